"""Helpers for the tests of checkpoints: states that follow from their step, and functions to save and compare them."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from allstep.common.checkpoint import Checkpoints, OutputDirectory, Progress, TrainState

DATA_FILES = ["model.safetensors", "optimizer.safetensors"]
ALL_FILES = [*DATA_FILES, "manifest.json"]


def state_of(step: int, arrays: dict[str, np.ndarray] | None = None) -> TrainState:
    """Return a state that follows only from its step, the oracle for what was saved."""
    values = np.random.default_rng(step).standard_normal(12).astype(np.float32)
    return TrainState(
        framework="pytorch",
        arrays=arrays or {"model/dense.weight": values.reshape(3, 4), "optimizer/dense.weight/momentum": -values},
        progress=Progress(
            epoch=step // 10,
            offset=step % 10 * 64,
            step=step,
            samples_seen=step * 64,
            running={"loss_sum": step / 3, "best": -math.inf},
        ),
        rng={"bit_generator": "PCG64", "state": 2**127 + step},
        schedule={"base_lr": 0.1},
        config={"model": "mlp", "hidden": [16, 8], "clip": None},
        versions={"numpy": np.__version__},
        data={"training labels": f"{step:016x}"},
    )


def assert_same(left: TrainState, right: TrainState) -> None:
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
        other = right.arrays[name]
        assert (array.dtype, array.shape, array.tobytes()) == (other.dtype, other.shape, other.tobytes()), name
    for part in ("framework", "progress", "rng", "schedule", "config", "versions", "data"):
        assert getattr(left, part) == getattr(right, part), part


def refuse_warning(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def save(output: Path, *steps: int, keep: int = 3, metrics: dict[int, float] | None = None) -> Path:
    """Save the states of `steps` and return the checkpoints directory."""
    with OutputDirectory(output, warn=refuse_warning) as locked:
        checkpoints = Checkpoints(locked, keep=keep)
        for step in steps:
            checkpoints.save(state_of(step), metric=(metrics or {}).get(step))
        checkpoints.close()
    return output / "checkpoints"


def forge(checkpoint: Path, **changes: object) -> None:
    """Change the manifest and recompute its checksum, as an attacker can."""
    content = json.loads((checkpoint / "manifest.json").read_text()) | changes
    del content["checksum"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(content))


def forge_file(checkpoint: Path, name: str, data: bytes) -> None:
    """Replace a file of arrays by `data`, and recompute all checksums."""
    (checkpoint / name).write_bytes(data)
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    files[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(checkpoint, files=files)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message
