"""Checkpoints of a user's training loop, written atomically and without pickle.

    from allstep import checkpoint
    checkpoint.save("runs/a", step, {"model": model.state_dict(), "position": [epoch, offset]})
    step, state = checkpoint.load("runs/a") or (0, None)

The state may consist of numbers, strings, lists, tuples, mappings, arrays and torch tensors.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, warn
from allstep.common.files import array_json
from allstep.common.files.disk import discard, foreign_entries, is_expendable, unused
from allstep.common.launch.unclaimed_ranks import current_ranks

_REPLACED = ".old-"
_NAME = re.compile(rf"(?:{re.escape(_REPLACED)})?step-(\d{{8,}})")


def save(folder: str | Path, step: int, state: Any, *, keep: int = 3) -> None:
    """Write the state of a loop after a step on rank 0; the other ranks return at once.

    A kill at any moment leaves the earlier checkpoints intact, and the new one either complete or absent. If the folder
    has later steps, an earlier run has left them: they are moved to a folder previous-N, with a line, so that `load`
    returns the state of the loop that saved last.

    Args:
        keep: number of the last checkpoints to keep, at least 1.

    Raises:
        UserError: `state` holds values of other types, `step` is negative, or `keep` is below 1.
        OSError: the checkpoint cannot be written, or a folder of its name holds files of the user.
    """
    if step < 0 or keep < 1:
        raise UserError(f"expected step >= 0 and keep >= 1, received {step} and {keep}")
    rank, _ = current_ranks()
    if rank:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial, target = folder / ".partial", folder / f"step-{step:08}"
    if os.path.lexists(partial):
        discard(partial, array_json.is_own_file)
    array_json.save(partial, state)
    if os.path.lexists(target) and (foreign := foreign_entries(target, array_json.is_own_file)):
        raise FileExistsError(f"{target} holds {foreign[0]!a}, which allstep did not write")
    _set_aside(folder, [path for number, path in _found(folder) if number > step])
    if os.path.lexists(target):
        replaced = folder / f"{_REPLACED}{target.name}"
        if os.path.lexists(replaced):
            discard(replaced, array_json.is_own_file)
        target.rename(replaced)
    partial.rename(target)
    for path in folder.glob(f"{_REPLACED}step-*"):
        if path.with_name(path.name.removeprefix(_REPLACED)).exists():
            discard(path, array_json.is_own_file)
    for _, old in _found(folder)[:-keep]:
        if is_expendable(old, array_json.is_own_file):
            discard(old, array_json.is_own_file)


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
    found: dict[int, Path] = {}
    # A kill may have left a checkpoint under its second name, before the one that replaces it took the first.
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


def _set_aside(folder: Path, later: list[Path]) -> None:
    """Move the checkpoints of an earlier run to a folder of their own."""
    if later:
        aside = unused(folder / "previous")
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        warn(f"{folder} has later steps of an earlier run, kept in {aside}; load() would have gone on with them")


def _converted(value: Any, as_array: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return as_array(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(item, as_array) for item in value)
    return {key: _converted(item, as_array) for key, item in value.items()} if isinstance(value, dict) else value
