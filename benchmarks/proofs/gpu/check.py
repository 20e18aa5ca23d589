"""What the project promises of GPUs, measured on one, as a table with bounds; `tools/gpu_check.sh` runs it:

    tools/gpu_check.sh [--list] [--only NAME,...] [--device cpu]

Needs a GPU and `make setup GPU=1`, no network, and 8 minutes, which its checks share: one that takes too long is ended,
and what it has not measured counts as missed. Figures are on stderr as they come, and in the table at the end. The exit
status is 0 where all bounds are reached, 1 where one is missed. --device cpu tries whether everything runs, with sizes
whose figures say nothing.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.benchmarks.harness.measure import Figure, TookTooLong, job, print_rows, print_table, run
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
    share: float
    """Of the time, beside the shares of the other checks: seconds that it is expected to take on a GPU."""


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
    "first-run": Check("README's runs on two ranks end well, on any number of GPUs", exactness.first_run, 20),
    "curves": Check("float32 on GPU, CPU and in both frameworks: the same losses over 50 steps", exactness.curves, 25),
    "equal-bits": Check("two equal runs with --deterministic end in equal bits", exactness.equal_bits, 30),
    "fp16": Check("fp16 learns what float32 learns", exactness.half_precision, 25),
    "synchronisations": Check("no step in PyTorch waits for the GPU", _one(synchronisations), 15),
    "resnet50": Check("PyTorch's ResNet-50 beside one by hand", _one(speed.large, "pytorch", compiled=False), 30),
    "resnet50-compiled": Check("both compiled", _one(speed.large, "pytorch", compiled=True), 75),
    "images": Check("training from JPEG files beside synthetic images", _one(speed.real_images), 60),
    "decode": Check("--decode gpu beside the CPU's threads", speed.decoding, 25),
    "cnn": Check("PyTorch's CNN beside one by hand", _one(speed.small, "pytorch", "cnn"), 25),
    "resnet18": Check(
        "PyTorch's ResNet-18 on small images beside one by hand", _one(speed.small, "pytorch", "resnet18"), 25
    ),
    "tensorflow-resnet50": Check(
        "TensorFlow's ResNet-50 beside Keras' own", _one(speed.large, "tensorflow", compiled=False), 50
    ),
    "tensorflow-resnet50-compiled": Check("both by XLA", _one(speed.large, "tensorflow", compiled=True), 100),
    "tensorflow-cnn": Check("TensorFlow's CNN beside one by hand", _one(speed.small, "tensorflow", "cnn"), 30),
    "deterministic-cost": Check("PyTorch's --deterministic", _one(speed.deterministic_cost, "pytorch"), 25),
    "tensorflow-deterministic-cost": Check("TensorFlow's", _one(speed.deterministic_cost, "tensorflow"), 35),
}
# Most checks end early and leave their time to the others, so that one may take more than its part.
_PATIENCE = 2
_WIDTH = 70  # of figures' names, as they come


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
    """The figures of the checks; where one fails or is ended, a row that is not reached stands for it."""
    ends = time.monotonic() + effort.seconds
    figures = []
    for number, name in enumerate(names):
        started = time.monotonic()
        part = CHECKS[name].share / sum(CHECKS[other].share for other in names[number:])
        seconds = (ends - started) * min(1, _PATIENCE * part)
        measured = _measure(name, replace(effort, seconds=seconds), directory / name)
        print(f"{name}: {time.monotonic() - started:.0f} s of at most {seconds:.0f}", file=sys.stderr)
        print_rows(measured, _WIDTH, sys.stderr)
        figures += measured
    return figures


def _measure(name: str, effort: Effort, folder: Path) -> list[Figure]:
    folder.mkdir()
    started = time.monotonic()
    try:
        with _at_most(effort.seconds):
            return CHECKS[name].measure(effort, folder)
    except TookTooLong:
        traceback.print_exc()
        missed = f"ended after {time.monotonic() - started:.0f} s"
    except Exception:  # whatever it is: the other checks say something without this one
        traceback.print_exc()
        missed = "failed"
    return [Figure(f"{name}: {missed}", math.nan, math.nan, math.nan, "<= 0")]  # reached by no measure


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End the block, wherever it waits, after so many seconds.

    Raises:
        TookTooLong: it has not ended by itself; harnesses add what its jobs have printed.
    """

    def end(signum: int, frame: object) -> None:
        raise TookTooLong(f"took over {seconds:.0f} s")  # no OSError, which some code below passes over

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would be never
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    run_rank(main)
