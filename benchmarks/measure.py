"""What the benchmarks share: real launches, interleaved rounds, medians and the table of results.

Figures are ratios of things measured in turn (A B A B ...) on the same machine, so that what else the machine does
meets all of them alike; the median over the rounds drops the rounds that were disturbed.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from allstep.benchmarks import marked
from allstep.benchmarks.comparison import results

JOB_SECONDS = 600


class BenchmarkFailed(Exception):
    """A job of the benchmark did not end well; the message has its output."""


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    what: str
    """What was measured, with its unit."""
    ours: float
    reference: float
    ratio: float
    """The figure itself, made of the other two; a difference where `target` is one."""
    target: str
    """`>= 0.98` or `<= 0.01`; empty for a figure without one."""

    @property
    def reached(self) -> bool:
        """Whether the ratio meets the target; always, where there is none."""
        if not self.target:
            return True
        relation, bound = self.target.split()
        return self.ratio >= float(bound) if relation == ">=" else self.ratio <= float(bound)


def interleaved(measurements: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Take each measurement once a round, in the same order in every round; samples by name, in the order of rounds.

    Each is told on stderr when it is there.
    """
    samples: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(num_rounds):
        for name, measure in measurements.items():
            samples[name].append(measure())
            print(f"round {number + 1} of {num_rounds}: {name} {samples[name][-1]:.5g}", file=sys.stderr, flush=True)
    return samples


def median_ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Median of the rounds' ratios; both sequences are in the order of rounds.

    Raises:
        ValueError: they have different lengths.
    """
    return statistics.median(one / other for one, other in zip(ours, reference, strict=True))


def median_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Median of the rounds' differences, ours minus the reference."""
    return statistics.median(one - other for one, other in zip(ours, reference, strict=True))


def largest_relative_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Largest |a - b| / |b| over two curves of the same length."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, reference, strict=True))


def environment() -> dict[str, str]:
    """That of a user who activated the virtual environment; one thread a rank."""
    path = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def job(module: str, *arguments: object, num_ranks: int | None = 2) -> list[str]:
    """The command that runs a module on `num_ranks` ranks under horovodrun; alone for None."""
    launcher = ["horovodrun", "-np", str(num_ranks)] if num_ranks else []
    return [*launcher, "python", "-m", module, *map(str, arguments)]


@contextmanager
def running(command: Sequence[str], printed: list[str] | None = None) -> Iterator[subprocess.Popen]:
    """A job that has been started; the end of the block waits for its end.

    If the block raises, the job is ended with all that it has started.

    Args:
        printed: gets what the job printed, when it has ended.

    Raises:
        BenchmarkFailed: it failed, or took longer than JOB_SECONDS.
    """
    mark = marked.new_mark()
    process = subprocess.Popen(
        command,
        env={**environment(), marked.VARIABLE: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        output, _ = process.communicate(timeout=JOB_SECONDS)
    except BaseException as error:
        marked.end([process], mark, deadline=marked.ask_to_end([process]))
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchmarkFailed(f"{' '.join(command)} took over {JOB_SECONDS} s:\n{output}") from None
        raise
    if process.returncode:
        raise BenchmarkFailed(f"{' '.join(command)} ended with status {process.returncode}:\n{output}")
    if printed is not None:
        printed.append(output)


def run(*commands: Sequence[str]) -> list[str]:
    """Run jobs at the same time, to their ends; what each printed."""
    printed: list[str] = []
    with ExitStack() as jobs:
        for command in commands:
            jobs.enter_context(running(command, printed))
    return printed[::-1]  # the stack leaves the last one first


def seconds_until(command: Sequence[str], happened: Callable[[], bool]) -> float:
    """Start a job and return the seconds from then until `happened`; the job then runs to its end."""
    started = time.perf_counter()
    with running(command) as process:
        while not happened():
            if process.poll() is not None and not happened():
                break
            time.sleep(0.005)
        seconds = time.perf_counter() - started
    if not happened():
        raise BenchmarkFailed(f"{' '.join(command)} ended without what was waited for")
    return seconds


def print_table(figures: Sequence[Figure]) -> None:
    """One line a figure."""
    width = max(len(figure.what) for figure in figures)
    print(f"{'':{width}} {'ours':>10} {'reference':>10} {'ratio':>10} {'target':>9}  reached")
    for figure in figures:
        verdict = ("yes" if figure.reached else "NO") if figure.target else ""
        print(
            f"{figure.what:{width}} {figure.ours:>10.5g} {figure.reference:>10.5g} {figure.ratio:>10.4g} "
            f"{figure.target:>9}  {verdict}",
            flush=True,
        )


def save(path: Path, figures: Sequence[Figure], samples: Mapping[str, object]) -> None:
    """Write figures and raw samples to the file that a user named."""
    content = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
        "num_cores": len(os.sched_getaffinity(0)),
        "figures": [{**asdict(figure), "reached": figure.reached} for figure in figures],
        "samples": samples,
    }
    results.write_output(path, content, results.BENCHMARK)


def events(output_dir: Path, name: str) -> list[dict]:
    """The events of that name in a run's metrics.jsonl, in order."""
    lines = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == name]


def printed_rates(printed: str, *, num_warmup: int = 1) -> list[float]:
    """Images per second from the epoch lines of a run that wrote no files, so that nothing but training is measured."""
    return [float(rate) for rate in re.findall(r"Images/sec = ([\d.]+)", printed)][num_warmup:]


def epoch_rates(output_dir: Path, *, num_warmup: int = 1) -> list[float]:
    """Images per second of each epoch of a trainer's run after the first ones, which warm up."""
    return [event["images_per_second"] for event in events(output_dir, "epoch")][num_warmup:]
