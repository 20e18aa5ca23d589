"""Checkpoints of a user's training loop, written atomically and without pickle.

    from allstep import checkpoint
    checkpoint.save("runs/a", step, {"model": model.state_dict(), "position": [epoch, offset]})
    step, state = checkpoint.load("runs/a") or (0, None)

The state may consist of numbers, strings, lists, mappings, arrays and torch tensors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.files import array_json
from allstep.common.launch.placement import find_placement

_NAME = re.compile(r"step-(\d{8,})")


def save(folder: str | Path, step: int, state: Any, *, keep: int = 3) -> None:
    """Write the state of a loop after a step on rank 0; the other ranks return at once.

    A kill at any moment leaves the earlier checkpoints intact, and the new one either complete or absent.

    Args:
        keep: number of the last checkpoints to keep.

    Raises:
        UserError: `state` holds values of other types.
        OSError: the checkpoint cannot be written.
    """
    if find_placement().rank:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    array_json.save(partial, state)
    target = folder / f"step-{step:08}"
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for _, old in _found(folder)[:-keep]:
        shutil.rmtree(old)


def load(folder: str | Path, *, as_array: Callable[[np.ndarray], Any] = np.asarray) -> tuple[int, Any] | None:
    """Return step and state of the last checkpoint, on every rank; None if there is none yet.

    Args:
        as_array: conversion of each array, such as `torch.from_numpy`.

    Raises:
        UserError: the checkpoint is damaged.
    """
    found = _found(Path(folder))
    if not found:
        return None
    step, path = found[-1]
    return step, _converted(array_json.load(path), as_array)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Return steps and folders of the checkpoints, the last one last."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)))


def _converted(value: Any, as_array: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return as_array(value)
    if isinstance(value, list):
        return [_converted(item, as_array) for item in value]
    return {key: _converted(item, as_array) for key, item in value.items()} if isinstance(value, dict) else value
