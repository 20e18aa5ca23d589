"""Checkpoint on disk: a directory that is either complete or absent.

    step-00001234/model.safetensors       weights
    step-00001234/optimizer.safetensors   optimizer slots
    step-00001234/ema.safetensors         moving averages of the weights, if the run keeps them
    step-00001234/constants.safetensors   buffers of the network with nan or infinity, if it has any
    step-00001234/manifest.json           everything else, and size and SHA-256 of these files

File names are fixed, so nothing in a manifest can point outside its directory; nothing is ever unpickled.
"""

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.checkpoint import manifest as manifests
from allstep.common.checkpoint.manifest import FileRecord, Manifest, NewerFormat, file_name
from allstep.common.checkpoint.state import CONSTANTS, FILES, GROUPS, OPTIONAL_FILES, TrainState, content_of
from allstep.common.files import strict_json
from allstep.common.files.disk import check_memory, discard, foreign_entries, read_regular, regular, sha256_of, unused
from allstep.common.files.strict_json import Mismatch, Whole, brief, from_json, list_of, one_of, whole

MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"  # prefix of checkpoints being written or deleted
REPLACED = ".old-"  # prefix of a complete checkpoint while a new one takes its name
# Types that safetensors can return as NumPy arrays: bool, integers and floats, except the long double.
DTYPES = frozenset(np.dtype(code) for code in "?bBhHiIlLqQefd")
# Names of these types in a file's header.
_DTYPE_NAMES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64")
# Valid headers have about a hundred bytes per array.
_MAX_HEADER_BYTES = 2**24
_MAX_NAME_CHARACTERS = 1000


def _shape(value: Any, where: str) -> None:
    list_of(whole(), maximum=32)(value, where)
    # Even for an empty array, NumPy multiplies the sides other than 0.
    whole()(8 * math.prod(side or 1 for side in value), f"the bytes of {where}")


@dataclass(frozen=True)
class _Entry:
    """Header of an array in a safetensors file."""

    CLOSED: ClassVar[bool] = True

    dtype: Annotated[str, one_of(*_DTYPE_NAMES)]
    shape: Annotated[tuple[int, ...], _shape]
    data_offsets: tuple[Whole, Whole]


class CorruptCheckpoint(UserError):
    """Error for a checkpoint that is truncated, changed or incomplete; the message names the file and the damage."""


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's directory, which sorts by step."""
    return f"step-{step:08d}"


def check_arrays(arrays: dict[str, np.ndarray]) -> None:
    """Check that every array can be written and read back unchanged.

    Raises UserError if an array has a dtype that NumPy lacks, such as bfloat16, the byte order of other machines, or a
    name that no reader accepts; ValueError if a name is outside the known groups, which is a mistake of the caller.
    """
    prefixes = tuple(f"{group}/" for group in GROUPS)
    for name, array in arrays.items():
        if not name.startswith(prefixes):
            raise ValueError(f"expected an array's name to start with one of {GROUPS}, received {name!r}")
        if not name.isprintable() or len(name) > _MAX_NAME_CHARACTERS:
            raise UserError(
                f"a checkpoint cannot hold a weight named {brief(name)}: names must be printable and have at most "
                f"{_MAX_NAME_CHARACTERS} characters; rename it"
            )
        if array.dtype not in DTYPES:
            raise UserError(
                f"expected {name} to be bool, integers or floats that NumPy has itself, received {array.dtype}: "
                "convert before saving (float32 holds every bfloat16 exactly)"
            )


def check_finite(arrays: dict[str, np.ndarray], *, but: Container[str] = ()) -> None:
    """Check that arrays are finite, so that a run can resume from them, but for constants, which are what they are.

    Raises UserError if an array contains nan or inf.
    """
    if name := _first_not_finite({name: array for name, array in arrays.items() if name not in but}):
        raise UserError(
            f"expected finite weights and slots to save, received nan or inf in {name}; the checkpoints before are "
            "unharmed: lower --base-lr or lengthen --warmup-epochs"
        )


def write(
    directory: Path, arrays: dict[str, np.ndarray], manifest: Manifest, *, constants: Container[str] = ()
) -> None:
    """Write a checkpoint so that `directory` is unchanged (or absent) or complete after a kill, full disk or power cut.

    It fills in `manifest.files`. Those of the `constants` that are not finite get a file of their own. No files are
    left behind where it raises OSError or safetensors.SafetensorError, since the checkpoint cannot be written.
    """
    from safetensors.numpy import save_file

    temporary = directory.with_name(TEMPORARY + directory.name)
    temporary.mkdir()
    apart = {name for name, array in arrays.items() if name in constants and not np.isfinite(array).all()}
    try:
        records = {}
        for group in FILES:
            path, members = temporary / file_name(group), _members(group, arrays, apart)
            if group in OPTIONAL_FILES and not members:
                continue
            save_file(members, path)
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors makes the file private to its owner
            records[path.name] = FileRecord(path.stat().st_size, sha256_of(path))
            _sync(path)
        path = temporary / MANIFEST
        path.write_bytes(manifests.encode(replace(manifest, files=records)))
        _sync(path)
        _sync(temporary)
        _take_name(temporary, directory)
    except BaseException:
        with contextlib.suppress(OSError):
            discard(temporary, is_own_file)
        raise


Check = Callable[[Manifest], object]
"""Function that raises Mismatch for a manifest that contradicts itself."""


def read_manifest(directory: Path, check: Check = id) -> Manifest:
    """Read and verify the manifest of the checkpoint in `directory`.

    Raises NewerFormat if a later version of allstep wrote it, CorruptCheckpoint if the manifest is damaged.
    """
    path = directory / MANIFEST
    try:
        manifest = manifests.decode(read_regular(path, maximum=manifests.MAX_BYTES))
        if name := re.fullmatch(rf"(?:{re.escape(REPLACED)})?step-(\d{{8,}})", directory.name):
            one_of(int(name[1]))(manifest.progress.step, "progress.step, as the folder's name has it,")
        check(manifest)
        return manifest
    except NewerFormat as error:
        raise NewerFormat(f"checkpoint {directory} {error}") from None
    except OSError as error:
        raise _corrupt(path, error.strerror) from None
    except (strict_json.NotJson, Mismatch) as error:
        raise _corrupt(path, error) from None


def read(directory: Path, groups: Sequence[str] = GROUPS, check: Check = id) -> TrainState:
    """Read the state in `directory` and verify every byte. Its arrays, those of `groups`, are writable and not shared.

    Raises NewerFormat if a later version of allstep wrote it, CorruptCheckpoint if the checkpoint is damaged.
    """
    manifest = read_manifest(directory, check)
    arrays = {}
    files = (*groups, CONSTANTS) if "model" in groups else groups
    for group in files:
        path = directory / file_name(group)
        if path.name not in manifest.files:
            continue
        members = _read_arrays(path, manifest.files[path.name], finite=group != CONSTANTS)
        prefix = "model" if group == CONSTANTS else group
        arrays |= {f"{prefix}/{name}": array for name, array in members.items()}
    return TrainState(arrays=arrays, **content_of(manifest))


def _read_arrays(path: Path, expected: FileRecord, *, finite: bool = True) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError

    try:
        with open(path, "rb", opener=regular) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != expected.size:  # checked before reading, because a damaged file may have any size
                raise _corrupt(path, f"expected {expected.size} bytes, received {size}")
            check_memory(path, 2 * size)  # its content, and the arrays made of it
            data = stream.read(size)
        if hashlib.sha256(data).hexdigest() != expected.sha256:
            raise _corrupt(path, "its content does not match its checksum")
        arrays = decode_arrays(data)
    except OSError as error:
        raise _corrupt(path, error.strerror) from None
    except (strict_json.NotJson, Mismatch, SafetensorError) as error:
        raise _corrupt(path, error) from None
    if finite and (name := _first_not_finite(arrays)):  # `check_finite` prevents writing such a file
        raise _corrupt(path, f"expected finite numbers, received nan or inf in {brief(name)}")
    return arrays


def decode_arrays(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in the content of a safetensors file, by name.

    Raises NotJson, Mismatch or SafetensorError if it is not a safetensors file, or has types that NumPy lacks.
    """
    from safetensors.numpy import load

    _check_header(data)
    return load(data)


def _check_header(data: bytes) -> None:
    """Check what safetensors does not: the size of the header, and types and names of the arrays.

    Raises NotJson or Mismatch if the header is not like those of `write`.
    """
    size = int.from_bytes(data[:8], "little")
    whole(2, min(_MAX_HEADER_BYTES, max(2, len(data) - 8)))(size, "the header's size in bytes")
    header = strict_json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise Mismatch(f"expected an object as header, received {brief(header)}")
    header.pop("__metadata__", None)  # safetensors checks it, and it is not used
    for name, entry in header.items():
        if len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
            raise Mismatch(
                f"expected printable names of at most {_MAX_NAME_CHARACTERS} characters, received {brief(name)}"
            )
        from_json(_Entry, entry, brief(name))


def is_own_file(name: str) -> bool:
    """Return whether a file of that name in a checkpoint is allstep's; safetensors writes under a random name first."""
    return name in _FILES or re.fullmatch(r"\.tmp\w{6}", name) is not None


_FILES = frozenset({MANIFEST, *map(file_name, FILES)})
_LEFT_OVER = re.compile(rf"({re.escape(TEMPORARY)}|{re.escape(REPLACED)})(step-\d{{8,}})")


def remove(directory: Path) -> None:
    """Delete a checkpoint so that a kill never leaves a partial one under its name; keep one that holds other files."""
    if foreign_entries(directory, is_own_file):
        return
    doomed = directory.with_name(TEMPORARY + directory.name)
    directory.rename(doomed)
    discard(doomed, is_own_file)


def remove_all(parent: Path) -> None:
    """Delete `parent`, a checkpoints directory, and its checkpoints, whole or partial, but for foreign files."""
    if not parent.is_dir() or parent.is_symlink():
        return
    for path in sorted(parent.iterdir()):
        if re.fullmatch(r"step-\d{8,}", path.name):
            remove(path)
        elif _LEFT_OVER.fullmatch(path.name) and not foreign_entries(path, is_own_file):
            discard(path, is_own_file)
    with contextlib.suppress(OSError):  # something else is there
        parent.rmdir()


def clean_up(parent: Path) -> None:
    """Clean up what killed runs have left in the checkpoints directory `parent`.

    Only the holder of the output directory's lock may call it; without the lock, another run may still use these files.
    Raises UserError if a name that allstep needs belongs to something that it did not write, OSError if a file cannot
    be moved or removed.
    """
    for path in sorted(parent.iterdir()):
        if not (match := _LEFT_OVER.fullmatch(path.name)):
            continue
        whole, foreign = path.with_name(match[2]), foreign_entries(path, is_own_file)
        if foreign and (match[1] == TEMPORARY or not _is_checkpoint(path)):
            raise UserError(f"{path} holds {quote(foreign[0])}, which allstep did not write; move it elsewhere")
        if match[1] == TEMPORARY:
            discard(path, is_own_file)
        elif whole.exists():
            _discard_replaced(path, whole)
        else:
            path.rename(whole)


def _is_checkpoint(path: Path) -> bool:
    return not path.is_symlink() and (path / MANIFEST).is_file()


def make_durable_directory(path: Path) -> None:
    """Create `path` if it does not exist, so that it survives a power cut."""
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def _members(group: str, arrays: dict[str, np.ndarray], apart: set[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file; those `apart` are in that of the constants."""
    prefix = "model/" if group == CONSTANTS else f"{group}/"
    return {
        # safetensors writes memory in its order, so a strided view must be made contiguous.
        name.removeprefix(prefix): np.asarray(array, order="C")
        for name, array in arrays.items()
        if name.startswith(prefix) and (name in apart) == (group == CONSTANTS)
    }


def _take_name(temporary: Path, directory: Path) -> None:
    # Renaming to a directory that is not empty fails. A run that resumes from an earlier checkpoint reaches the same
    # step again, so the old one is renamed first; meanwhile, readers find it by its prefix.
    replaced = directory.with_name(REPLACED + directory.name)
    if os.path.lexists(directory):
        foreign = foreign_entries(directory, is_own_file)
        if foreign and not _is_checkpoint(directory) and not any(map(is_own_file, foreign)):
            raise FileExistsError(f"its name belongs to {quote(foreign[0])}, which allstep did not write")
        directory.rename(replaced)
    temporary.rename(directory)
    _sync(directory.parent)
    if replaced.exists():
        _discard_replaced(replaced, directory)


def _discard_replaced(replaced: Path, directory: Path) -> None:
    """Remove the checkpoint whose name `directory` has taken; files that a user put into it keep their path.

    One with a folder, a FIFO or a link in the place of a file is kept under another name.
    """
    foreign = foreign_entries(replaced, is_own_file)
    if any(map(is_own_file, foreign)):
        replaced.rename(unused(directory.with_name(f"{directory.name}.damaged")))
        return
    for name in foreign:
        (replaced / name).rename(directory / name)
    discard(replaced, is_own_file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_not_finite(arrays: dict[str, np.ndarray]) -> str | None:
    return next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)


def _corrupt(path: Path, reason: object) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"checkpoint file {path} is damaged: {reason}")
