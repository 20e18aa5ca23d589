"""Helpers for the tests of `allstep compare`: made-up cells and samples, and a search for launched processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import REPOSITORY

from allstep.commands.compare import samples
from allstep.commands.compare.cells import Cell, Settings
from allstep.commands.compare.records import CellResult, ComparisonResult, Sample, Verdict
from allstep.commands.shared import machine
from allstep.commands.shared.jobs import Outcome
from allstep.commands.shared.measure import Estimate
from allstep.commands.shared.records.measured import Block, EpochResult, Measured

SETTINGS = Settings(2, 2, 2, "digits", None, 2, 0.01, 0.9, 3, 1, True)
OK = Outcome("ok", None, 1000.0, 9.0, None)
TEST = "ALLSTEP_TEST"
"""Environment variable by which processes launched by a test are found."""


def cell(
    workload: str = "synthetic-weak",
    strategy: str = "horovod",
    ranks: int = 2,
    framework: str = "pytorch",
    precision: str = "float32",
    compiled: bool = False,
) -> Cell:
    return Cell(workload, framework, strategy, ranks, "cnn", 64, precision, compiled)


def output(
    *seconds_by_rank: list[float], first_step_at: float = 1004.0, accuracies: tuple[float, ...] = ()
) -> Measured:
    epochs = [
        EpochResult(number, 0.5, 0.6, validation_accuracy=accuracy, seconds=2.0 * number)
        for number, accuracy in enumerate(accuracies, 1)
    ]
    blocks = tuple(Block(100, tuple(seconds)) for seconds in seconds_by_rank)
    return Measured(blocks, (10,) * len(seconds_by_rank[0]), first_step_at, tuple(epochs) or None)


def made(of: Cell, number: int, *outputs: Measured) -> Sample:
    return samples.make(of, number, OK, outputs, target=0.9, commands=[["true"]])


def estimate(median: float, half: float = 0.0, num: int = 5) -> Estimate:
    """Return statistics with a confidence interval of +- `half`."""
    return Estimate(num, median, median, median - half, median + half, half, median - half, median + half)


def result(of: Cell, **known: Any) -> CellResult:
    """Return the result of a successful, comparable cell; `known` replaces or adds fields."""
    nothing = dict.fromkeys(
        ("reason", "startup_seconds", "seconds_to_target", "final_accuracy", "peak_memory_bytes_by_rank", "curve")
    )
    nothing |= {"target_accuracy": None, "efficiency": None, "against": {}, "samples": (), "command": "true"}
    went_well = {"status": "ok", "images_per_second": estimate(1.0), "comparable": True, "gate": Verdict("passed")}
    return CellResult(**vars(of), **{**nothing, **went_well, **known})


def comparison(*cells: CellResult) -> ComparisonResult:
    """Return the content of a compare.json with these cells."""
    return ComparisonResult(
        created="then", updated="now", finished=True, command="allstep compare", settings=SETTINGS, num_rounds=5,
        rules=(), environment=machine.describe(REPOSITORY, threads_per_rank=1), cells=cells,
    )  # fmt: skip


def launched_processes(test: str) -> set[int]:
    """Return the running processes that were started with this value of the variable TEST."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TEST}={test}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
