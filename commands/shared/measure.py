"""Tools of measurements: launches, interleaved rounds, and statistics of samples.

Figures are ratios of measurements taken in turn (A B A B ...) on the same machine, so that other load on the machine
affects all of them alike; the median over the rounds drops disturbed rounds.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.shared.jobs import Job, running, start
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.errors import Fault
from allstep.common.files.strict_json import Count, NonNegative, Positive

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
            wait(job, command)
        return [job.printed() for job in jobs]


def wait(job: Job, command: Sequence[str]) -> None:
    """Wait until a job ends. Raises BenchmarkFailed if it failed, TookTooLong if it took longer than JOB_SECONDS."""
    try:
        status = job.wait(JOB_SECONDS)
    except (TimeoutError, TookTooLong) as error:  # from the job, or from a caller's own time limit
        raise TookTooLong(f"{' '.join(command)} {error}:\n{job.printed()}") from None
    if status:
        raise BenchmarkFailed(f"{' '.join(command)} ended with status {status}:\n{job.printed()}")


def epoch_rates(output_dir: Path) -> list[float]:
    """Return the images per second of each epoch of a trainer's run after the first, which warms up."""
    epochs = read_events(output_dir / FILE).epochs
    return [epoch.images_per_second for epoch in epochs if epoch.images_per_second is not None][1:]


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
    where the mean of many repetitions would be, and the standard deviation tells where the next sample will be.
    """
    num, mean = len(samples), statistics.fmean(samples)
    stdev = half = 0.0
    if num > 1:
        from scipy.special import stdtrit

        stdev = statistics.stdev(samples)
        half = float(stdtrit(num - 1, (1 + CONFIDENCE) / 2)) * stdev / math.sqrt(num)
    return Estimate(num, statistics.median(samples), mean, mean - half, mean + half, stdev, min(samples), max(samples))
