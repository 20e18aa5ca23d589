"""Measure on a GPU what the project promises of GPUs, and print a table with bounds:

    tools/gpu_check.sh [--list] [--only NAME,...] [--device cpu]

Needs a GPU and `make setup GPU=1`, no network, and at most 8 minutes. Each check has a share of that time, and what
earlier checks have left over. A check that takes longer is ended, one for which too little time is left is not run, and
both count as missed. Figures are printed to stderr as they come, and in the table at the end. The exit status is 0 if
all bounds are reached, 1 otherwise. --device cpu only tests that everything runs, with sizes too small for figures.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from allstep.benchmarks.figures import missing, print_rows, print_table
from allstep.benchmarks.gpu import exactness, speed
from allstep.benchmarks.gpu.effort import ON_CPU, ON_GPU, Effort
from allstep.commands.shared import machine
from allstep.commands.shared.jobs import run_jobs, scratch_folder
from allstep.commands.shared.measure import TookTooLong
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import Parser, listed, one_of
from allstep.common.process.exit import run_rank


@dataclass(frozen=True)
class Check:
    """Check of one promise."""

    what: str
    """Description in one line, for --list."""
    measure: Callable[[Effort, Path], list[Figure]]
    """Function that returns the figures; its folder exists and is used by no other check."""
    seconds: float
    """Seconds reserved for the check."""


TRIALS: dict[str, tuple[str, Callable[[Effort, Path], exactness.Trial]]] = {
    "first-run": ("README's runs on two ranks end well, on any number of GPUs", exactness.first_run),
    "curves": ("float32 on GPU, CPU and in both frameworks: the same losses over 50 steps", exactness.curves),
    "compiled-curves": ("the same with and without --compile", exactness.compiled_curves),
    "equal-bits": ("two equal runs with --deterministic end in equal bits", exactness.equal_bits),
    "fp16": ("fp16 learns what float32 learns", exactness.half_precision),
    "synchronisations": ("no step in PyTorch waits for the GPU", exactness.synchronisations),
}
"""Checks that measure no time and run concurrently: the description for --list and the trial, by name."""
TRIALS_SECONDS = 85  # they are the first to read several GB of libraries from the disk
# Seconds as measured on one H100 with 16 cores: a hand-written ResNet-50 trains 3,965 images/s in PyTorch and 697 in
# TensorFlow, XLA's first step takes 51 s, a start 10 s (PyTorch) or 20 s (TensorFlow, with tracing). The checks that
# show most in the least time come first.
CHECKS = {
    "resnet50": Check(
        "PyTorch's ResNet-50 against a hand-written one", partial(speed.large, "pytorch", compiled=False), 35
    ),
    "resnet50-compiled": Check("both compiled", partial(speed.large, "pytorch", compiled=True), 65),
    "images": Check("training from JPEG files against synthetic images", speed.real_images, 55),
    "decode": Check("--decode gpu against the CPU's threads", speed.decoding, 20),
    "small": Check(
        "PyTorch's CNN and ResNet-18 on small images against hand-written ones, --compile and --deterministic",
        partial(speed.small, "pytorch"),
        40,
    ),
    "tensorflow-resnet50": Check(
        "TensorFlow's ResNet-50 against Keras' own", partial(speed.large, "tensorflow", compiled=False), 45
    ),
    "tensorflow-resnet50-compiled": Check("both by XLA", partial(speed.large, "tensorflow", compiled=True), 85),
    "tensorflow-small": Check(
        "TensorFlow's CNN against a hand-written one, --compile and --deterministic",
        partial(speed.small, "tensorflow"),
        40,
    ),
}
_MIN_SHARE = 0.5  # share of a check's seconds that must be left for it to start
_WIDTH = 70  # of figures' names on stderr


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
    if flags.device == "cuda" and not machine.num_visible_gpus():
        parser.error("expected a GPU, received a machine that shows none; --device cpu tries whether everything runs")
    effort = ON_GPU if flags.device == "cuda" else ON_CPU
    with scratch_folder("gpu-check") as directory:
        figures = measure(flags.only, effort, directory)
    print_table(figures)
    if not all(figure.reached for figure in figures):
        sys.exit(1)


def measure(names: Sequence[str], effort: Effort, directory: Path) -> list[Figure]:
    """Return the figures of the checks; a check that fails, is ended or is not run gives a row that is not reached."""
    ends = time.monotonic() + effort.seconds
    plan = {name: CHECKS[name] for name in names if name in CHECKS}
    if trials := [name for name in names if name in TRIALS]:
        together = Check("", lambda effort, folder: _try_all(trials, effort, folder), TRIALS_SECONDS)
        plan = {",".join(trials): together, **plan}
    figures = []
    for number, (name, check) in enumerate(plan.items()):
        started = time.monotonic()
        # All but the seconds that are reserved for later checks.
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
    except Exception:  # any error: the other checks are useful without this one
        traceback.print_exc()
        return [missing(name, "failed")]


def _try_all(names: Sequence[str], effort: Effort, folder: Path) -> list[Figure]:
    """Return the figures of trials whose runs are executed concurrently."""
    trials = {name: TRIALS[name][1](effort, folder / name) for name in names}
    owners = [name for name, trial in trials.items() for _ in trial.commands]
    jobs = [[command] for trial in trials.values() for command in trial.commands]
    for name in names:
        (folder / name).mkdir()
    reasons: dict[str, str] = {}
    # Less than the time of the whole check, so that runs that did end are reported.
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
    """End the block, wherever it waits, after a number of seconds.

    Raises TookTooLong if it did not end by itself; callees add what its jobs have printed.
    """

    def end(signum: int, frame: object) -> None:
        raise TookTooLong(f"took over {seconds:.0f} s")  # not an OSError, which some callees suppress

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would disable the timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    run_rank(main)
