"""Runs that nothing disturbs, for tests of runs that are stopped and go on: they must end alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy_ranks import train
from ranks import events

from allstep.common.checkpoint import load

SAVING = ("--epochs", 2, "--checkpoint-every", 3, "--keep-checkpoints", 100)
NUM_STEPS = 8  # 2 epochs of 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the output directory of a run of SAVING on a number of ranks with further flags; each is made once."""
    made: dict[tuple, Path] = {}

    def make(num_ranks: int, *flags) -> Path:
        key = (num_ranks, *flags)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("undisturbed")
            train(num_ranks, made[key], *SAVING, *flags)
        return made[key]

    return make


def checkpoint(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"step-{step:08d}"


def saved(output_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output_dir / "checkpoints").iterdir())


def assert_ended_alike(output_dir: Path, expected: Path, *, exactly: bool = True) -> None:
    """Compare all that two runs report but times, and the bits of their last checkpoints if they shall be equal.

    Sums over an epoch are added up in another order after a resume.
    """
    skipped = {"epoch_seconds", "cumulative_seconds", "images_per_second", "peak_memory_bytes"}
    if not exactly:
        skipped |= {"weights_checksum", "gradient_noise_scale"}

    def reported(path: Path) -> list[dict]:
        found = [event for event in events(path) if event["event"] != "start"]
        return [{name: value for name, value in event.items() if name not in skipped} for event in found]

    for one, other in zip(reported(output_dir), reported(expected), strict=True):
        assert {**one, "event": 0, "weights_checksum": 0} == pytest.approx(
            {**other, "event": 0, "weights_checksum": 0}, rel=1e-9 if exactly else 1e-5
        )
        assert [one["event"], one.get("weights_checksum")] == [other["event"], other.get("weights_checksum")]
    one, other = (load("latest", path / "checkpoints", warn=pytest.fail).arrays for path in (output_dir, expected))
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, rtol=0, atol=0 if exactly else 1e-5)
