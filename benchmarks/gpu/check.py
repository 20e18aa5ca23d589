"""What the project promises of GPUs, measured on one, as a table with bounds; `tools/gpu_check.sh` runs it:

    tools/gpu_check.sh [--list] [--only NAME,...] [--device cpu]

Needs a GPU and `make setup GPU=1`, no network, and at most 8 minutes: each check has a part of them to itself, and what
those before it have left over. One that takes longer is ended, one for which too little is left is not run, and either
counts as missed. Figures are on stderr as they come, and in the table at the end. The exit status is 0 where all bounds
are reached, 1 where one is missed. --device cpu tries whether everything runs, with sizes whose figures say nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.benchmarks.gpu import exactness, speed
from allstep.benchmarks.gpu.effort import ON_CPU, ON_GPU, Effort
from allstep.commands.shared import nvml
from allstep.commands.shared.jobs import run_jobs
from allstep.commands.shared.measure import TookTooLong, print_rows, print_table
from allstep.commands.shared.records.figures import Figure, missing
from allstep.common.base.flag_types import Parser, listed, one_of
from allstep.common.process.exit import run_rank


@dataclass(frozen=True)
class Check:
    """Something to be measured."""

    what: str
    """One line for --list."""
    measure: Callable[[Effort, Path], list[Figure]]
    """Its figures; the folder is there, and other checks leave it alone."""
    seconds: float
    """That it has to itself."""


def _large(framework: str, *, compiled: bool) -> Callable[[Effort, Path], list[Figure]]:
    return lambda effort, folder: [speed.large(framework, effort, folder, compiled=compiled)]


TRIALS: dict[str, tuple[str, Callable[[Effort, Path], exactness.Trial]]] = {
    "first-run": ("README's runs on two ranks end well, on any number of GPUs", exactness.first_run),
    "curves": ("float32 on GPU, CPU and in both frameworks: the same losses over 50 steps", exactness.curves),
    "compiled-curves": ("the same with and without --compile", exactness.compiled_curves),
    "equal-bits": ("two equal runs with --deterministic end in equal bits", exactness.equal_bits),
    "fp16": ("fp16 learns what float32 learns", exactness.half_precision),
    "synchronisations": ("no step in PyTorch waits for the GPU", exactness.synchronisations),
}
"""What is no matter of time, and run at once; by name, the line for --list and what is tried."""
TRIALS_SECONDS = 85  # they are the first to read several GB of libraries from the disk
# Seconds by what one H100 with 16 cores took where the issue on GPUs measured it: ResNet-50 by hand 3,965 images/s in
# PyTorch and 697 in TensorFlow, XLA's first step 51 s, a start 10 s (PyTorch) and 20 s (TensorFlow, with tracing). What
# says most in the least time comes first.
CHECKS = {
    "resnet50": Check("PyTorch's ResNet-50 beside one by hand", _large("pytorch", compiled=False), 35),
    "resnet50-compiled": Check("both compiled", _large("pytorch", compiled=True), 65),
    "images": Check(
        "training from JPEG files beside synthetic images",
        lambda effort, folder: [speed.real_images(effort, folder)],
        55,
    ),
    "decode": Check("--decode gpu beside the CPU's threads", speed.decoding, 20),
    "small": Check(
        "PyTorch's CNN and ResNet-18 on small images beside ones by hand, --compile and --deterministic",
        lambda effort, folder: speed.small("pytorch", effort, folder),
        40,
    ),
    "tensorflow-resnet50": Check("TensorFlow's ResNet-50 beside Keras' own", _large("tensorflow", compiled=False), 45),
    "tensorflow-resnet50-compiled": Check("both by XLA", _large("tensorflow", compiled=True), 85),
    "tensorflow-small": Check(
        "TensorFlow's CNN beside one by hand, --compile and --deterministic",
        lambda effort, folder: speed.small("tensorflow", effort, folder),
        40,
    ),
}
_MIN_SHARE = 0.5  # of its seconds that must be left for a check to be worth a start
_WIDTH = 70  # of figures' names, as they come


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("tools/gpu_check.sh", __doc__)
    parser.add_argument("--list", action="store_true", help="print the checks, and measure nothing")
    names = (*TRIALS, *CHECKS)
    parser.add_argument("--only", type=listed(one_of(*names)), default=names, metavar="NAME,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    flags = parser.parse_args(argv)
    if flags.list:
        for name in flags.only:
            print(f"{name:30} {TRIALS[name][0] if name in TRIALS else CHECKS[name].what}")
        return
    if flags.device == "cuda" and not nvml.num_visible():
        parser.error("expected a GPU, received a machine that shows none; --device cpu tries whether everything runs")
    effort = ON_GPU if flags.device == "cuda" else ON_CPU
    with tempfile.TemporaryDirectory(prefix="allstep-gpu-check-") as directory:
        figures = measure(flags.only, effort, Path(directory))
    print_table(figures)
    if not all(figure.reached for figure in figures):
        sys.exit(1)


def measure(names: Sequence[str], effort: Effort, directory: Path) -> list[Figure]:
    """The figures of the checks; where one fails, is ended or is not run, a row that is not reached stands for it."""
    ends = time.monotonic() + effort.seconds
    plan = {name: CHECKS[name] for name in names if name in CHECKS}
    if trials := [name for name in names if name in TRIALS]:
        together = Check("", lambda effort, folder: _try_all(trials, effort, folder), TRIALS_SECONDS)
        plan = {",".join(trials): together, **plan}
    figures = []
    for number, (name, check) in enumerate(plan.items()):
        started = time.monotonic()
        # All but what those after it have to themselves.
        seconds = ends - started - sum(later.seconds for later in [*plan.values()][number + 1 :])
        if seconds < _MIN_SHARE * check.seconds:
            measured = [missing(name, "not run, for there was no time left")]
        else:
            measured = _measure(name, check, replace(effort, seconds=seconds), directory / str(number))
        print(f"{name}: {time.monotonic() - started:.0f} s of at most {seconds:.0f}", file=sys.stderr)
        print_rows(measured, _WIDTH, sys.stderr)
        figures += measured
    return figures


def _measure(name: str, check: Check, effort: Effort, folder: Path) -> list[Figure]:
    folder.mkdir()
    started = time.monotonic()
    try:
        with _at_most(effort.seconds):
            return check.measure(effort, folder)
    except TookTooLong:
        traceback.print_exc()
        return [missing(name, f"ended after {time.monotonic() - started:.0f} s")]
    except Exception:  # whatever it is: the other checks say something without this one
        traceback.print_exc()
        return [missing(name, "failed")]


def _try_all(names: Sequence[str], effort: Effort, folder: Path) -> list[Figure]:
    """The figures of trials whose runs are under way at once."""
    trials = {name: TRIALS[name][1](effort, folder / name) for name in names}
    owners = [name for name, trial in trials.items() for _ in trial.commands]
    jobs = [[command] for trial in trials.values() for command in trial.commands]
    for name in names:
        (folder / name).mkdir()
    reasons: dict[str, str] = {}
    # Before all of it is ended, so that those that did end are seen.
    limit = 0.9 * effort.seconds
    for number, outcome in run_jobs(jobs, at_once=len(os.sched_getaffinity(0)), time_limit=limit, num_threads=1):
        if outcome.status != "ok":
            print(f"{owners[number]}: {outcome.reason}\n{outcome.log}", file=sys.stderr)
            reasons[owners[number]] = "ended for its time" if outcome.status == "timeout" else "failed"
    return [
        figure
        for name, trial in trials.items()
        for figure in ([missing(name, reasons[name])] if name in reasons else trial.figures())
    ]


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
