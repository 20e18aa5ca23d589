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

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import manifest as manifests
from allstep.common.checkpoint.directories import MANIFEST, REPLACED, TEMPORARY, is_own_file, sync, take_name
from allstep.common.checkpoint.manifest import FileRecord, Manifest, NewerFormat, file_name
from allstep.common.checkpoint.state import CONSTANTS, FILES, GROUPS, OPTIONAL_FILES, TrainState, content_of
from allstep.common.files import strict_json
from allstep.common.files.disk import check_memory, discard, read_regular, regular, sha256_of
from allstep.common.files.strict_json import Mismatch, Whole, brief, from_json, list_of, one_of, whole

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


class Forbidden(UserError):
    """Error for a checkpoint that this user may not read, which says nothing about its content."""


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
            sync(path)
        path = temporary / MANIFEST
        path.write_bytes(manifests.encode(replace(manifest, files=records)))
        sync(path)
        sync(temporary)
        take_name(temporary, directory)
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
        raise _unreadable(path, error) from None
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
        raise _unreadable(path, error) from None
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


def _members(group: str, arrays: dict[str, np.ndarray], apart: set[str]) -> dict[str, np.ndarray]:
    """Return the arrays of a file; those `apart` are in that of the constants."""
    prefix = "model/" if group == CONSTANTS else f"{group}/"
    return {
        # safetensors writes memory in its order, so a strided view must be made contiguous.
        name.removeprefix(prefix): np.asarray(array, order="C")
        for name, array in arrays.items()
        if name.startswith(prefix) and (name in apart) == (group == CONSTANTS)
    }


def _first_not_finite(arrays: dict[str, np.ndarray]) -> str | None:
    return next((name for name, array in arrays.items() if not np.isfinite(array).all()), None)


def _unreadable(path: Path, error: OSError) -> UserError:
    if isinstance(error, PermissionError):
        return Forbidden(f"checkpoint file {path} cannot be read: {error.strerror}; let this user, or name another one")
    return _corrupt(path, error.strerror)


def _corrupt(path: Path, reason: object) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"checkpoint file {path} is damaged: {reason}")
