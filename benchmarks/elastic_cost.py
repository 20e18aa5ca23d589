"""Measure what `--elastic` costs an undisturbed job: the seconds of its steps, with and without.

    python -m allstep.benchmarks.elastic_cost [--frameworks pytorch,tensorflow] [--output FILE]

Two jobs of two ranks under `horovodrun --gloo`, one of them elastic, train the cnn and take turns of a hundred steps,
in each of which the elastic one commits. The figure is the median over the turns. The host discovery script, which
horovodrun starts every second, runs during the turns of both. The exit status is 0 if the target is reached, 1
otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from allstep.benchmarks.runner import benchmark
from allstep.commands.shared.measure import JOB_SECONDS, BenchmarkFailed, compared
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import read_json
from allstep.commands.shared.turns import Launch, run_in_turn
from allstep.common.process.exit import run_rank

NUM_RANKS = 2
FLAGS = (
    *("--dataset", "synthetic", "--synthetic-samples", 1_000_000, "--model", "cnn", "--global-batch-size", 64),
    # A job that waits for its turn is not suspended.
    *("--fault-timeout", JOB_SECONDS, "--stall-timeout", JOB_SECONDS),
)


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the figure of one framework, and the seconds of each block of the elastic job and of the other one.

    Raises BenchmarkFailed if a job has failed.
    """
    hosts = folder / "hosts"
    hosts.write_text(f"localhost:{NUM_RANKS}\n")
    discovery = ("--min-np", NUM_RANKS, "--max-np", NUM_RANKS, "--host-discovery-script", f"cat {hosts}")
    sides = {f"{framework}-elastic": (discovery, ("--elastic",)), f"{framework}-plain": ((), ())}
    launches = [
        Launch([_command(framework, folder / name, *words)], folder / f"{name}.turns", polls=True)
        for name, words in sides.items()
    ]
    for outcome in run_in_turn(launches, time_limit=JOB_SECONDS, num_threads=1):
        if outcome.status != "ok":
            raise BenchmarkFailed(f"{outcome.reason}\n{outcome.log}")
    samples = [read_json(tuple[float, ...], folder / f"{name}.json") for name in sides]
    return [compared(f"{framework}: seconds of 100 steps, --elastic / without", *samples, target="<= 1.01")], samples


def _command(framework: str, path: Path, launcher_flags: Sequence[object], flags: Sequence[object]) -> list[str]:
    program = ("python", "-m", "allstep.benchmarks.timed", "steps", framework)
    files = (path.with_suffix(".json"), path.with_suffix(".turns"))
    launcher = ("horovodrun", "--gloo", "-np", NUM_RANKS, *launcher_flags)
    return list(map(str, (*launcher, *program, *files, *FLAGS, *flags)))


main = benchmark("elastic_cost", __doc__, measure)

if __name__ == "__main__":
    run_rank(main)
