"""Selection of a checkpoint by `latest`, `best` or a path, with fallbacks if it is damaged."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import directories, files
from allstep.common.checkpoint.manifest import Manifest, NewerFormat
from allstep.common.checkpoint.state import GROUPS, TrainState

T = TypeVar("T")


def load(
    which: str | os.PathLike[str],
    parent: str | os.PathLike[str],
    *,
    warn: Callable[[str], None],
    groups: Sequence[str] = GROUPS,
    check: files.Check = id,
) -> TrainState:
    """Load a checkpoint and verify every byte. It needs no lock and changes nothing on disk.

    `which` is "latest" or "best" (highest validation accuracy) in the checkpoints directory `parent`, or the path of a
    checkpoint, or of a checkpoints or output directory, of which the latest checkpoint is loaded. If the latest or best
    is damaged, or `check` raises Mismatch for its manifest, the next one is loaded with a warning; a checkpoint named
    by its path has no such fallback. Only the arrays of `groups` are read. Raises CorruptCheckpoint, which names the
    file, if the named checkpoint is damaged; UserError if no checkpoint exists, all are damaged, a later version of
    allstep wrote it, or this user may not read it.
    """
    return _first_good(which, Path(parent), functools.partial(files.read, groups=groups, check=check), warn)


def load_manifest(which: str | os.PathLike[str], parent: str | os.PathLike[str], check: files.Check = id) -> Manifest:
    """Return the manifest of the checkpoint that `load` would load if no arrays are damaged, without warnings.

    Raises UserError as `load` does.
    """
    return _first_good(which, Path(parent), functools.partial(files.read_manifest, check=check), lambda _: None)


def _first_good(
    which: str | os.PathLike[str], parent: Path, read: Callable[[Path], T], warn: Callable[[str], None]
) -> T:
    """Return the result of `read` for the first checkpoint selected by `which` that can be read."""
    if which in ("latest", "best"):
        return _first_of(parent, read, warn, best=which == "best")
    path = Path(which)
    if path.is_dir():
        if re.fullmatch(r"step-\d+", path.name) or (path / directories.MANIFEST).exists():
            return _read_named(path, read)
        for candidate in (path, path / "checkpoints"):
            if checkpoint_directories(candidate):
                return _first_of(candidate, read, warn, best=False)
    raise UserError(f"expected latest, best or the path of a checkpoint, received {path}: {no_checkpoint(path)}")


def no_checkpoint(path: Path) -> str:
    """Return why a path is that of no checkpoint."""
    if (path.parent / directories.MANIFEST).exists():
        return f"a file in a checkpoint; name its folder, {path.parent}"
    if path.suffix == ".safetensors" and path.is_file():
        return "weights alone; give --init-from"
    if path.is_file():
        return "a file of another kind; convert weights of other programs by safetensors.torch.save_file"
    return "no checkpoint is in it" if path.exists() else "none is there"


def _read_named(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except files.CorruptCheckpoint as error:
        raise files.CorruptCheckpoint(
            f"{error}; name another one, or the directory above, whose latest undamaged one is taken"
        ) from None


def checkpoint_directories(parent: Path) -> list[Path]:
    """Return all checkpoints in `parent`, including damaged ones, by step."""
    paths = [path for path in parent.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    # Add checkpoints that were renamed for a replacement, whose run was killed before it took the name.
    paths += [
        path
        for path in parent.glob(f"{directories.REPLACED}step-*")
        if not path.with_name(path.name.removeprefix(directories.REPLACED)).exists()
    ]
    return sorted(paths, key=lambda path: path.name.removeprefix(directories.REPLACED))


def scan(parent: Path) -> tuple[list[tuple[Path, Manifest]], list[UserError]]:
    """Return the checkpoints in `parent`, oldest first, and the error of each manifest that cannot be read.

    Arrays are not read.
    """
    readable, errors = [], []
    for path in checkpoint_directories(parent):
        try:
            readable.append((path, files.read_manifest(path)))
        except UserError as error:
            errors.append(error)
    return sorted(readable, key=lambda item: item[1].sequence), errors


def best_of(checkpoints: list[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Return the checkpoints with a comparable metric, best first; of equal ones, the earliest comes first."""
    measured = [item for item in checkpoints if item[1].has_metric]
    return sorted(measured, key=lambda item: _worse(item[1]))


def _worse(manifest: Manifest) -> tuple[float, int]:
    """Return a key that sorts checkpoints with a metric, best first."""
    assert manifest.metric is not None  # has_metric
    return -manifest.metric, manifest.sequence


def _first_of(parent: Path, read: Callable[[Path], T], warn: Callable[[str], None], *, best: bool) -> T:
    readable, errors = scan(parent)
    for error in errors:
        # It is not damaged, and falling back to an older one would silently discard training.
        if isinstance(error, (NewerFormat, files.Forbidden)):
            raise error
        warn(f"{error}; it is skipped")
    if not readable and not errors:
        raise UserError(f"expected a checkpoint in {parent}, received none; name another, or train from the start")
    candidates = best_of(readable) if best else readable[::-1]
    if best and readable and not candidates:
        raise UserError(
            f"expected a checkpoint with a validation accuracy in {parent}, received none; resume the latest instead"
        )
    for path, _ in candidates:
        try:
            return read(path)
        except files.CorruptCheckpoint as error:
            errors.append(error)
            warn(f"{error}; falling back to the {'next best' if best else 'one before'}")
    raise UserError(
        f"expected an undamaged checkpoint in {parent}, received only damaged ones ({errors[0]}); "
        "name another, or train from the start"
    )
