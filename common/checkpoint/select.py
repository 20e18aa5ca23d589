"""Which checkpoint `latest`, `best` or a path means, and what happens when it is damaged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from allstep.common.checkpoint import files
from allstep.common.checkpoint.manifest import Manifest, NewerFormat
from allstep.common.checkpoint.state import TrainState
from allstep.common.errors import UserError


def load(which: str | os.PathLike, parent: str | os.PathLike, *, warn: Callable[[str], None]) -> TrainState:
    """Loads a checkpoint, verified byte by byte. Needs no lock and changes nothing on disk.

    `which` is "latest", "best" (highest validation accuracy) in the checkpoints directory `parent`, or a
    path: of one checkpoint, or of a checkpoints or output directory, whose latest is meant. A damaged
    latest or best falls back to the next one with a warning; a checkpoint named by its path does not.

    Raises:
        CorruptCheckpoint: the checkpoint named is damaged (says which file).
        UserError: there is none, all are damaged, or a later allstep wrote it.
    """
    if which in ("latest", "best"):
        return _load_first_good(Path(parent), best=which == "best", warn=warn)
    path = Path(which)
    if path.is_dir():
        if re.fullmatch(r"step-\d+", path.name) or (path / files.MANIFEST).exists():
            return _read_named(path)
        for candidate in (path, path / "checkpoints"):
            if checkpoint_directories(candidate):
                return _load_first_good(candidate, best=False, warn=warn)
    raise UserError(f"expected latest, best or the path of a checkpoint, received {path}: none is there")


def _read_named(path: Path) -> TrainState:
    try:
        return files.read(path)
    except files.CorruptCheckpoint as error:
        raise files.CorruptCheckpoint(
            f"{error}; name another one, or the directory above, whose latest undamaged one is taken"
        ) from None


def checkpoint_directories(parent: Path) -> list[Path]:
    """All checkpoints in `parent`, damaged ones included, by step."""
    paths = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    # Set aside for a successor whose run was killed just before it took the name.
    paths += [
        path
        for path in parent.glob(f"{files.REPLACED}step-*")
        if not path.with_name(path.name.removeprefix(files.REPLACED)).exists()
    ]
    return sorted(paths, key=lambda path: path.name.removeprefix(files.REPLACED))


def scan(parent: Path) -> tuple[list[tuple[Path, Manifest]], list[UserError]]:
    """The checkpoints in `parent` in the order they were written, and what is wrong with those whose
    manifest cannot be read. Arrays are not looked at."""
    readable, errors = [], []
    for path in checkpoint_directories(parent):
        try:
            readable.append((path, files.read_manifest(path)))
        except UserError as error:
            errors.append(error)
    return sorted(readable, key=lambda item: item[1].sequence), errors


def best_of(checkpoints: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Those with a metric that can be compared, best first; of equals, the earliest first."""
    measured = [item for item in checkpoints if item[1].has_metric]
    return sorted(measured, key=lambda item: (-item[1].metric, item[1].sequence))


def _load_first_good(parent: Path, *, best: bool, warn: Callable[[str], None]) -> TrainState:
    readable, errors = scan(parent)
    for error in errors:
        # Not damaged: going back to an older one would silently throw away its training.
        if isinstance(error, NewerFormat):
            raise error
        warn(f"{error}; it is skipped")
    if not readable and not errors:
        raise UserError(f"expected a checkpoint in {parent}, found none: start without --resume")
    candidates = best_of(readable) if best else readable[::-1]
    if best and readable and not candidates:
        raise UserError(f"no checkpoint in {parent} has a validation accuracy: resume the latest instead")
    for path, _ in candidates:
        try:
            return files.read(path)
        except files.CorruptCheckpoint as error:
            warn(f"{error}; falling back to the {'next best' if best else 'one before'}")
    raise UserError(f"expected an undamaged checkpoint in {parent}, found none: start without --resume")
