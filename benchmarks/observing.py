"""What it costs a script to be looked at by `allstep prove`: the seconds of its steps, with and without.

    python -m allstep.benchmarks.observing [--steps K] [--rounds R] [--output FILE]

The script is `handwritten/observed.py` on two ranks. Both sides run in turn, and the figure is the median over the
rounds. The exit status is 0 where the target is reached, 1 where it is missed.
"""

from __future__ import annotations

import functools
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.prove.observer.observer import Settings
from allstep.commands.prove.observer.start import environment
from allstep.commands.shared.jobs import running
from allstep.commands.shared.launchers import start
from allstep.commands.shared.measure import JOB_SECONDS, BenchmarkFailed, interleaved, median_ratio, print_table, save
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, whole
from allstep.common.process.exit import run_rank

SCRIPT = Path(__file__).with_name("handwritten") / "observed.py"
BOUND = "<= 3"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where the target is missed."""
    parser = Parser("python -m allstep.benchmarks.observing", __doc__)
    parser.add_argument("--steps", type=whole(3, 1000), default=10, help="of the script (10)")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3, help="launches of each kind (3)")
    parser.add_argument("--output", type=output_file, default="runs/observing.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    sides = {"observed": functools.partial(_observed, flags.steps), "plain": functools.partial(_seconds, flags.steps)}
    samples = interleaved(sides, flags.rounds)
    observed, plain = samples["observed"], samples["plain"]
    ratio = median_ratio(observed, plain)
    what = "seconds of the steps, observed / plain"
    rows = [Figure(what, statistics.median(observed), statistics.median(plain), ratio, BOUND)]
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def _observed(num_steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="allstep-observing-") as folder:
        return _seconds(num_steps, environment(Settings(folder, str(SCRIPT), num_steps)))


def _seconds(num_steps: int, environ: dict[str, str] | None = None) -> float:
    """What the script says that its steps took."""
    with running([*start("horovodrun", 2), SCRIPT, num_steps], environ=environ) as job:
        status, printed = job.wait(JOB_SECONDS), job.printed()
    found = re.search(r"seconds = ([\d.]+)", printed)
    if status or not found:
        raise BenchmarkFailed(f"{SCRIPT.name} ended with status {status}:\n{printed}")
    return float(found[1])


if __name__ == "__main__":
    run_rank(main)
