"""Tools of measurements: launches, interleaved rounds, statistics of samples, and the table of results.

Figures are ratios of measurements taken in turn (A B A B ...) on the same machine, so that other load on the machine
affects all of them alike; the median over the rounds drops disturbed rounds.
"""

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from allstep.commands.shared.jobs import Job, running, start
from allstep.commands.shared.records import files
from allstep.commands.shared.records.measured import BenchmarkResult, Figure, Handwritten
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.errors import Fault
from allstep.common.files.records import Count, NonNegative, Positive

JOB_SECONDS = 600


class BenchmarkFailed(Fault):
    """Raised if a job of the benchmark failed; the message has its output."""


class TookTooLong(BenchmarkFailed):
    """Raised if a job was ended because it took too long."""


def interleaved(measurements: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Take each measurement once per round, always in the same order; return samples by name, in the order of rounds.

    Each sample is printed to stderr as soon as it is taken.
    """
    samples: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(num_rounds):
        for name, measure in measurements.items():
            samples[name].append(measure())
            print(f"round {number + 1} of {num_rounds}: {name} {samples[name][-1]:.5g}", file=sys.stderr, flush=True)
    return samples


def median_ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the rounds' ratios; both sequences are in the order of rounds.

    Raises ValueError if the sequences have different lengths.
    """
    return statistics.median(one / other for one, other in zip(ours, reference, strict=True))


def median_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the rounds' differences, ours minus the reference."""
    return statistics.median(one - other for one, other in zip(ours, reference, strict=True))


def compared(
    what: str,
    ours: Sequence[float],
    reference: Sequence[float],
    *,
    target: str = "",
    by: Callable[[Sequence[float], Sequence[float]], float] = median_ratio,
) -> Figure:
    """Return the row of two series of samples: their medians, and the median of the rounds' ratios or differences."""
    return Figure(what, statistics.median(ours), statistics.median(reference), by(ours, reference), target)


def largest_relative_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |a - b| / |b| over two curves of the same length."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, reference, strict=True))


def job(module: str, *arguments: object, num_ranks: int | None = 2) -> list[str]:
    """Return the command that runs a module on `num_ranks` ranks under horovodrun; without a launcher for None."""
    return [*start("horovodrun" if num_ranks else None, num_ranks), "-m", module, *map(str, arguments)]


def run(*commands: Sequence[str]) -> list[str]:
    """Run jobs at the same time to their ends and return what each printed.

    Raises BenchmarkFailed if a job failed, TookTooLong if one took longer than JOB_SECONDS.
    """
    with ExitStack() as stack:
        jobs = [stack.enter_context(running(command)) for command in commands]
        for job, command in zip(jobs, commands, strict=True):
            _wait(job, command)
        return [job.printed() for job in jobs]


def seconds_until(command: Sequence[str], happened: Callable[[], bool]) -> float:
    """Start a job and return the seconds until `happened`; the job then runs to its end.

    Raises BenchmarkFailed if the job failed, or ended before `happened`.
    """
    started = time.perf_counter()
    with running(command) as job:
        while not happened():
            if job.status is not None and not happened():
                break
            time.sleep(0.005)
        seconds = time.perf_counter() - started
        _wait(job, command)
    if not happened():
        raise BenchmarkFailed(f"{' '.join(command)} ended without what was waited for")
    return seconds


def _wait(job: Job, command: Sequence[str]) -> None:
    try:
        status = job.wait(JOB_SECONDS)
    except (TimeoutError, TookTooLong) as error:  # from the job, or from a caller's own time limit
        raise TookTooLong(f"{' '.join(command)} {error}:\n{job.printed()}") from None
    if status:
        raise BenchmarkFailed(f"{' '.join(command)} ended with status {status}:\n{job.printed()}")


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line per figure, under the columns' names."""
    width = max(len(figure.what) for figure in figures)
    print(f"{'':{width}} {'ours':>10} {'reference':>10} {'ratio':>10} {'target':>9}  reached")
    print_rows(figures, width, sys.stdout)


def print_rows(figures: Sequence[Figure], width: int, file: TextIO) -> None:
    """Print the lines of a table whose first column is `width` wide."""
    for figure in figures:
        verdict = ("yes" if figure.reached else "NO") if figure.target else ""
        print(
            f"{figure.what:{width}} {figure.ours:>10.5g} {figure.reference:>10.5g} {figure.ratio:>10.4g} "
            f"{figure.target:>9}  {verdict}",
            file=file,
            flush=True,
        )


def save(path: Path, figures: Sequence[Figure], samples: Mapping[str, object]) -> None:
    """Write figures and raw samples to the user's file."""
    result = BenchmarkResult(
        figures=tuple(figures),
        samples=samples,
        time=files.now(),
        load_average=os.getloadavg(),
        num_cores=len(os.sched_getaffinity(0)),
    )
    files.write_output(path, result)


def printed_rates(printed: str) -> list[float]:
    """Return images/s of each epoch after the first from a run's output; such runs write no files, only train."""
    return [float(rate) for rate in re.findall(r"Images/sec = ([\d.]+)", printed)][1:]


def epoch_rates(output_dir: Path) -> list[float]:
    """Return the images per second of each epoch of a trainer's run after the first, which warms up."""
    epochs = read_events(output_dir / FILE).epochs
    return [epoch.images_per_second for epoch in epochs if epoch.images_per_second is not None][1:]


def new_output(directory: Path) -> Path:
    """Return a path in a new folder, for the output of a job."""
    return Path(tempfile.mkdtemp(dir=directory)) / "output"


def run_handwritten(directory: Path, command: Callable[[Path], Sequence[str]]) -> Handwritten:
    """Run a hand-written script and return what it wrote. Raises BenchmarkFailed if it failed.

    `command` returns the script's command, which writes to the given path.
    """
    output = new_output(directory)
    run(command(output))
    return files.read_json(Handwritten, output)


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Statistics of samples of one quantity, in its unit."""

    num: Count
    """Number of samples."""
    median: Positive
    mean: Positive
    low: float
    """Lower end of the confidence interval of the mean; `low` and `high` are the mean of a single sample."""
    high: float
    stdev: NonNegative
    """Standard deviation of samples, with n - 1 degrees of freedom; 0 for a single sample."""
    min: float
    max: float


def estimate(samples: Sequence[float]) -> Estimate:
    """Return statistics of at least one sample.

    The interval is Student's (1908): mean +- t s / sqrt(n), with the quantile t of n - 1 degrees of freedom. It tells
    where the mean of many repetitions would be; where the next sample will be, the standard deviation tells.
    """
    num, mean = len(samples), statistics.fmean(samples)
    stdev = half = 0.0
    if num > 1:
        from scipy.special import stdtrit

        stdev = statistics.stdev(samples)
        half = float(stdtrit(num - 1, (1 + CONFIDENCE) / 2)) * stdev / math.sqrt(num)
    return Estimate(num, statistics.median(samples), mean, mean - half, mean + half, stdev, min(samples), max(samples))
