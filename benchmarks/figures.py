"""Figures of benchmarks: ours and a reference measured in turn, their ratios with targets, the table, and the file."""

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from allstep.commands.shared.jobs import running
from allstep.commands.shared.measure import BenchmarkFailed, median_ratio, run, wait
from allstep.commands.shared.records import files
from allstep.commands.shared.records.measured import BenchmarkResult, Figure


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


def median_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the rounds' differences, ours minus the reference."""
    return statistics.median(one - other for one, other in zip(ours, reference, strict=True))


def largest_relative_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |a - b| / |b| over two curves of the same length."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, reference, strict=True))


def missing(what: str, why: str) -> Figure:
    """Return a row for a figure that could not be measured, with a target that is not reached."""
    return Figure(f"{what}: {why}", math.nan, math.nan, math.nan, "<= 0")


def print_table(figures: Sequence[Figure]) -> None:
    """Print one line per figure, under the columns' names."""
    width = max(len(figure.what) for figure in figures)
    print(f"{'':{width}} {'ours':>10} {'reference':>10} {'ratio':>10} {'target':>9}  reached")
    print_rows(figures, width, sys.stdout)


def print_rows(figures: Sequence[Figure], width: int, file: TextIO) -> None:
    """Print the lines of a table whose first column is `width` wide."""
    for figure in figures:
        numbers = f"{figure.ours:>10.5g} {figure.reference:>10.5g} {figure.ratio:>10.4g}"
        print(f"{figure.what:{width}} {numbers} {figure.target:>9}  {figure.verdict}", file=file, flush=True)


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
        wait(job, command)
    if not happened():
        raise BenchmarkFailed(f"{' '.join(command)} ended without what was waited for")
    return seconds


@dataclass(frozen=True)
class Handwritten:
    """Results of a hand-written script with which a trainer is compared."""

    images_per_second: tuple[float, ...]
    """Images per second of each epoch."""
    losses: tuple[float, ...] = ()
    """Mean loss of each global batch."""


def run_handwritten(directory: Path, command: Callable[[Path], Sequence[str]]) -> Handwritten:
    """Run a hand-written script and return what it wrote. Raises BenchmarkFailed if it failed.

    `command` returns the script's command, which writes to the given path.
    """
    output = new_output(directory)
    run(command(output))
    return files.read_json(Handwritten, output)


def new_output(directory: Path) -> Path:
    """Return a path in a new folder, for the output of a job."""
    return Path(tempfile.mkdtemp(dir=directory)) / "output"


def printed_rates(printed: str) -> list[float]:
    """Return images/s of each epoch after the first from a run's output; such runs write no files, only train."""
    return [float(rate) for rate in re.findall(r"Images/sec = ([\d.]+)", printed)][1:]
