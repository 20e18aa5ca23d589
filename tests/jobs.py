"""Helpers for the tests of both frameworks' strategies: jobs, their outputs, and ranks that fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import LAUNCHERS, last

from allstep.commands.parity.curves import weights_apart
from allstep.common.checkpoint import load

MPIRUN, HOROVODRUN_GLOO = LAUNCHERS["mpirun"], LAUNCHERS["horovodrun-gloo"]


@dataclass(frozen=True)
class Job:
    """Flags and launcher of a strategy."""

    flags: tuple[str | int, ...]
    """The strategy's name and further flags."""
    launcher: tuple[str | int, ...] = ()
    resumes: bool = False
    """Whether it resumes from a checkpoint that `single` wrote in mid-epoch, instead of from the start."""


def losses(events: list[dict]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def arrays(output_dir: Path, step: int) -> dict:
    return load(output_dir / "checkpoints" / f"step-{step:08d}", output_dir, warn=print).arrays


def assert_same_curve(events: list[dict], expected: list[dict], *, first_step: int) -> None:
    """Compare losses from `first_step` to the last step, 52, validation and the number of parameters."""
    found, reference = losses(events), losses(expected)
    assert list(found) == list(range(first_step, 53))
    assert found == pytest.approx({step: reference[step] for step in found}, rel=1e-4)
    for field in ("validation_samples", "validation_loss", "train_loss"):
        assert last(events, "epoch")[field] == pytest.approx(last(expected, "epoch")[field], rel=1e-5)
    assert last(events, "start")["parameter_count"] == last(expected, "start")["parameter_count"]


def assert_same_weights(output_dir: Path, expected_dir: Path, step: int) -> None:
    """Compare weights and optimizer slots of the checkpoint after a step."""
    assert weights_apart(arrays(expected_dir, step), arrays(output_dir, step)) <= 1e-5


_BROKEN = """
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.{framework} import train
class Breaks(Hook):
    def on_step(self, session):
        worker, step = session.worker, session.progress.step
        if session.placement.rank == 1:
            {what}
run_rank(lambda: train.main(hooks=[Breaks()]))
"""
RAISES = "if step == 7: raise OSError('lost the disk')"


def broken(framework: str, what: str, folder: Path) -> Path:
    """Write a trainer whose rank 1 runs the statement `what` after each step into `folder`, and return its path."""
    script = folder / "broken.py"
    script.write_text(_BROKEN.format(framework=framework, what=what))
    return script
