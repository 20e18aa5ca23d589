"""What tests of `allstep compare` share: cells and samples that are made up, and processes that are found."""

from __future__ import annotations

from pathlib import Path

from allstep.benchmarks.comparison import samples
from allstep.benchmarks.comparison.cells import Cell, Settings
from allstep.benchmarks.harness.jobs import Outcome

SETTINGS = Settings(2, 2, 2, "digits", None, 2, 0.01, 0.9, 3, 1, True)
OK = Outcome("ok", None, 1000.0, 9.0, None)
TEST = "ALLSTEP_TEST"
"""A variable that what a test launches inherits."""


def cell(
    workload: str = "synthetic-weak",
    strategy: str = "horovod",
    ranks: int = 2,
    framework: str = "pytorch",
    precision: str = "float32",
) -> Cell:
    return Cell(workload, framework, strategy, ranks, "cnn", 64, precision)


def output(*seconds_by_rank: list[float], first_step_at: float = 1004.0, accuracies: tuple[float, ...] = ()) -> dict:
    epochs = [
        {"epoch": number + 1, "seconds": 2.0 * (number + 1), "validation_accuracy": accuracy}
        for number, accuracy in enumerate(accuracies)
    ]
    return {
        "first_step_at": first_step_at,
        "blocks": [{"num_images": 100, "seconds_by_rank": seconds} for seconds in seconds_by_rank],
        "epochs": epochs or None,
        "peak_memory_bytes_by_rank": [10] * len(seconds_by_rank[0]),
    }


def made(of: Cell, number: int, *outputs: dict) -> dict:
    return samples.make(of, number, OK, outputs, target=0.9, commands=[["true"]])


def launched_processes(test: str) -> set[int]:
    """All that still runs of what was started with this value of the variable TEST."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TEST}={test}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found
