"""What `--elastic` costs a job that nothing disturbs: the seconds of its steps, with and without.

    python -m allstep.benchmarks.elastic_cost [--frameworks pytorch,tensorflow] [--output FILE]

Two jobs of two ranks under `horovodrun --gloo`, one of them elastic, train the cnn and take turns of a hundred steps,
in each of which the elastic one commits. The figure is the median over the turns. The script that horovodrun starts
each second to discover hosts falls into the turns of both. The exit status is 0 where the target is reached, 1 where it
is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared.measure import JOB_SECONDS, BenchmarkFailed, median_ratio, print_table, save
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file, read_json
from allstep.commands.shared.turns import Launch, run_in_turn
from allstep.common.base.flag_types import Parser, listed, one_of
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank

BOUND = "<= 1.01"
NUM_RANKS = 2
FLAGS = (
    *("--dataset", "synthetic", "--synthetic-samples", 1_000_000, "--model", "cnn", "--global-batch-size", 64),
    # A job that waits for its turn is no frozen one.
    *("--fault-timeout", JOB_SECONDS, "--stall-timeout", JOB_SECONDS),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where the target is missed."""
    parser = Parser("python -m allstep.benchmarks.elastic_cost", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--output", type=output_file, default="runs/elastic_cost.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    rows, samples = [], {}
    for framework in flags.frameworks:
        with tempfile.TemporaryDirectory(prefix="allstep-elastic-cost-") as folder:
            elastic, plain = samples[framework] = seconds_in_turn(framework, Path(folder))
        middle = statistics.median(elastic), statistics.median(plain)
        what = f"{framework}: seconds of 100 steps, --elastic / without"
        rows.append(Figure(what, *middle, median_ratio(elastic, plain), BOUND))
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def seconds_in_turn(framework: str, folder: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The seconds of each block of an elastic job, and of one that is not.

    Raises:
        BenchmarkFailed: one did not end well.
    """
    hosts = folder / "hosts"
    hosts.write_text(f"localhost:{NUM_RANKS}\n")
    discovery = ("--min-np", NUM_RANKS, "--max-np", NUM_RANKS, "--host-discovery-script", f"cat {hosts}")
    sides = {"elastic": (discovery, ("--elastic",)), "plain": ((), ())}
    launches = [
        Launch([_command(framework, folder / name, *words)], folder / f"{name}.turns", polls=True)
        for name, words in sides.items()
    ]
    for outcome in run_in_turn(launches, time_limit=JOB_SECONDS, num_threads=1):
        if outcome.status != "ok":
            raise BenchmarkFailed(f"{outcome.reason}\n{outcome.log}")
    elastic, plain = (read_json(tuple[float, ...], folder / f"{name}.json") for name in sides)
    return elastic, plain


def _command(framework: str, path: Path, launcher_flags: Sequence[object], flags: Sequence[object]) -> list[str]:
    module = ("python", "-m", "allstep.benchmarks.timed_steps", framework)
    files = (path.with_suffix(".json"), path.with_suffix(".turns"))
    launcher = ("horovodrun", "--gloo", "-np", NUM_RANKS, *launcher_flags)
    return list(map(str, (*launcher, *module, *files, *FLAGS, *flags)))


if __name__ == "__main__":
    run_rank(main)
