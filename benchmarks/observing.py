"""Measure what `allstep prove` costs the observed script: the seconds of its steps, with and without.

    python -m allstep.benchmarks.observing [--steps K] [--rounds R] [--output FILE]

The script is `handwritten/observed.py` on two ranks. Both sides run in turn, and the figure is the median over the
rounds. The exit status is 0 if the target is reached, 1 otherwise.
"""

import argparse
import functools
import re
import tempfile
from pathlib import Path

from allstep.benchmarks.figures import compared
from allstep.benchmarks.runner import benchmark
from allstep.commands.prove.observer.observer import Settings
from allstep.commands.prove.observer.start import environment
from allstep.commands.shared.jobs import running, start
from allstep.commands.shared.measure import JOB_SECONDS, BenchmarkFailed, interleaved
from allstep.commands.shared.records.measured import Figure
from allstep.common.base.flag_types import whole
from allstep.common.process.exit import run_rank

SCRIPT = Path(__file__).with_name("handwritten") / "observed.py"
STEPS = {"--steps": {"type": whole(3, 1000), "default": 10, "help": "steps of the script (10)"}}


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the figure and the seconds of each launch."""
    sides = {
        "observed": functools.partial(_observed, flags.steps, folder),
        "plain": functools.partial(_seconds, flags.steps),
    }
    samples = interleaved(sides, flags.rounds)
    return [compared("seconds of the steps, observed / plain", *samples.values(), target="<= 3")], samples


def _observed(num_steps: int, folder: Path) -> float:
    return _seconds(num_steps, environment(Settings(tempfile.mkdtemp(dir=folder), str(SCRIPT), num_steps)))


def _seconds(num_steps: int, environ: dict[str, str] | None = None) -> float:
    """Run the script and return the seconds that it reports for its steps."""
    with running([*start("horovodrun", 2), SCRIPT, num_steps], environ=environ) as job:
        status, printed = job.wait(JOB_SECONDS), job.printed()
    found = re.search(r"seconds = ([\d.]+)", printed)
    if status or not found:
        raise BenchmarkFailed(f"{SCRIPT.name} ended with status {status}:\n{printed}")
    return float(found[1])


main = benchmark("observing", __doc__, measure, frameworks=["pytorch"], rounds=3, flags=STEPS)

if __name__ == "__main__":
    run_rank(main)
