"""How long an elastic job of four ranks on two hosts takes until steps go on after one of them was killed:

    tests/cluster/two_hosts.sh 2 python -m allstep.benchmarks.elastic_recovery [--rounds N]

Jobs of the trainers and of a script that uses Horovod's own `hvd.elastic.run` take turns; in each, one rank after the
other is killed for half a minute. The exit status is 0 where the medians reach their targets, 1 else.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared.measure import print_table, save
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.commands.soak.elastic_job import BED, BED_DIRECTORY, KILLED, disturb, elastic_job
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, whole
from allstep.common.process.exit import run_rank

SECONDS = 30
HANDWRITTEN = "allstep.benchmarks.handwritten.pytorch_elastic"
TARGETS = {"pytorch": 10, "tensorflow": 20}
FLAGS = ("--model", "mlp", "--global-batch-size", 32, "--log-every", 1, "--elastic", "--commit-every", 10)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.elastic_recovery", __doc__)
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=2, metavar="N")
    parser.add_argument("--output", type=output_file, default="runs/elastic_recovery.json", help="for samples")
    flags = parser.parse_args(argv)
    if not BED_DIRECTORY.is_dir():
        parser.error("expected to run under tests/cluster/two_hosts.sh 2, received another place; start it by that")
    samples: dict[str, list[float]] = {name: [] for name in (*TARGETS, HANDWRITTEN)}
    for _ in range(flags.rounds):
        for framework in TARGETS:
            samples[framework] += seconds_after_kills(f"allstep.{framework}.train", *FLAGS, "--epochs", 100_000)
        samples[HANDWRITTEN] += seconds_after_kills(HANDWRITTEN)
    theirs = statistics.median(samples[HANDWRITTEN])
    rows = []
    for framework, target in TARGETS.items():
        ours = statistics.median(samples[framework])
        name = f"{framework}: seconds until steps go on, beside hvd.elastic of PyTorch"
        rows.append(Figure(name, ours, theirs, ours / theirs, f"<= {target / theirs:.3g}"))
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def seconds_after_kills(program: str, *flags: object) -> list[float]:
    """The seconds from each kill of a rank of one job to its next step."""
    with tempfile.TemporaryDirectory() as directory, elastic_job(program, BED, Path(directory), *flags) as job:
        return disturb(job, [KILLED], time.monotonic() + SECONDS, random.Random(0))[KILLED]


if __name__ == "__main__":
    run_rank(main)
