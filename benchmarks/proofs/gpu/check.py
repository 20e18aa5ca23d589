"""What the project promises of GPUs, measured on one, as a table with bounds; `tools/gpu_check.sh` runs it:

    tools/gpu_check.sh [--list] [--only NAME,...] [--device cpu]

Needs a GPU and `make setup GPU=1`, no network, and 8 minutes: what has not begun after 7 counts as missed. The exit
status is 0 where all bounds are reached, 1 where one is missed. --device cpu tries whether everything runs, with sizes
whose figures say nothing.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.harness.measure import BenchmarkFailed, Figure, job, print_table, run
from allstep.benchmarks.proofs.gpu import exactness, speed, synchronisation
from allstep.benchmarks.proofs.gpu.effort import ON_CPU, ON_GPU, Effort
from allstep.common.config.flags import Parser, listed, one_of
from allstep.common.process.exit import run_rank


@dataclass(frozen=True)
class Check:
    """Something to be measured."""

    what: str
    """One line for --list."""
    measure: Callable[[Effort, Path], list[Figure]]
    """Its figures; the folder is there, and other checks leave it alone."""


def _one(
    measure: Callable[..., Figure], *arguments: object, **options: object
) -> Callable[[Effort, Path], list[Figure]]:
    """The same for what measures one figure, with arguments of its own before those of every check."""
    return lambda effort, folder: [measure(*arguments, effort, folder, **options)]


def synchronisations(effort: Effort, folder: Path) -> Figure:
    output = folder / "waits"
    flags = ("--dataset", "synthetic", "--synthetic-shape", 32, 32, 3, "--model", "resnet18", "--precision", "bf16")
    run(job(synchronisation.__name__, output, *flags, "--device", effort.device, num_ranks=None))
    waits = int(output.read_text()) / synchronisation.NUM_STEPS
    return Figure("pytorch: waits of the host for the GPU in a step", waits, 0, waits, "<= 0")


# What says most in the least time comes first.
CHECKS = {
    "first-run": Check("README's runs on two ranks end well, on however many GPUs", lambda *_: exactness.first_run()),
    "curves": Check("float32 on GPU, CPU and in both frameworks: the same losses over 50 steps", exactness.curves),
    "equal-bits": Check("two equal runs with --deterministic end in equal bits", exactness.equal_bits),
    "fp16": Check("fp16 learns what float32 learns", exactness.half_precision),
    "synchronisations": Check("no step in PyTorch waits for the GPU", _one(synchronisations)),
    "resnet50": Check("PyTorch's ResNet-50 beside one by hand", _one(speed.large, "pytorch", compiled=False)),
    "resnet50-compiled": Check("both compiled", _one(speed.large, "pytorch", compiled=True)),
    "images": Check("training from JPEG files beside synthetic images", _one(speed.real_images)),
    "decode": Check("--decode gpu beside the CPU's threads", speed.decoding),
    "cnn": Check("PyTorch's CNN beside one by hand", _one(speed.small, "pytorch", "cnn")),
    "resnet18": Check(
        "PyTorch's ResNet-18 on small images beside one by hand", _one(speed.small, "pytorch", "resnet18")
    ),
    "tensorflow-resnet50": Check(
        "TensorFlow's ResNet-50 beside Keras' own", _one(speed.large, "tensorflow", compiled=False)
    ),
    "tensorflow-resnet50-compiled": Check("both by XLA", _one(speed.large, "tensorflow", compiled=True)),
    "tensorflow-cnn": Check("TensorFlow's CNN beside one by hand", _one(speed.small, "tensorflow", "cnn")),
    "deterministic-cost": Check("PyTorch's --deterministic", _one(speed.deterministic_cost, "pytorch")),
    "tensorflow-deterministic-cost": Check("TensorFlow's", _one(speed.deterministic_cost, "tensorflow")),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("tools/gpu_check.sh", __doc__)
    parser.add_argument("--list", action="store_true", help="print the checks, and measure nothing")
    parser.add_argument("--only", type=listed(one_of(*CHECKS)), default=tuple(CHECKS), metavar="NAME,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags = parser.parse_args(argv)
    if flags.list:
        for name in flags.only:
            print(f"{name:30} {CHECKS[name].what}")
        return
    effort = ON_GPU if flags.device == "cuda" else ON_CPU
    with tempfile.TemporaryDirectory(prefix="allstep-gpu-check-") as directory:
        figures = measure(flags.only, effort, Path(directory))
    print_table(figures)
    if not all(figure.reached for figure in figures):
        sys.exit(1)


def measure(names: Sequence[str], effort: Effort, directory: Path) -> list[Figure]:
    """The figures of the checks; where one fails or has no time left, a row that is not reached stands for it."""
    started = time.monotonic()
    figures = []
    for name in names:
        if time.monotonic() - started > effort.seconds:
            figures.append(_missing(f"{name}: no time was left"))
            continue
        folder = directory / name
        folder.mkdir()
        try:
            figures += CHECKS[name].measure(effort, folder)
        except BenchmarkFailed as error:
            print(f"{name} failed:\n{error}", file=sys.stderr, flush=True)
            figures.append(_missing(f"{name}: failed"))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return figures


def _missing(what: str) -> Figure:
    """A row that is reached by no measure."""
    return Figure(what, math.nan, math.nan, math.nan, "<= 0")


if __name__ == "__main__":
    run_rank(main)
