"""Weights trained elsewhere, in a safetensors file such as those of torchvision's and timm's networks."""

import os
import re
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.files import decode_arrays
from allstep.common.files import strict_json
from allstep.common.files.disk import check_memory, regular
from allstep.common.files.strict_json import Mismatch, NotJson

_SUFFIX = ".safetensors"
_BFLOAT16 = re.compile(rb'("dtype"\s*:\s*)"BF16"')


def is_weights_file(path: Path) -> bool:
    """Return whether `path` names a safetensors file instead of a checkpoint of allstep."""
    return path.suffix == _SUFFIX


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays in `path` by name, with floats of any precision converted to float32.

    Raises UserError if the file cannot be read, or is not a safetensors file.
    """
    from safetensors import SafetensorError

    try:
        with open(path, "rb", opener=regular) as stream:
            size = os.fstat(stream.fileno()).st_size
            check_memory(path, 3 * size)  # its content, and the arrays made of it, which may be larger
            arrays = _decoded(stream.read(size))
    except (OSError, NotJson, Mismatch, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"expected a readable file of weights at {path}: {reason}; take another one") from None
    return {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}


def _decoded(data: bytes) -> dict[str, np.ndarray]:
    """Return the arrays in a file, with those in bfloat16, which NumPy lacks, in float32; raises as `decode_arrays`."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end]
    if not _BFLOAT16.search(header):
        return decode_arrays(data)
    arrays = decode_arrays(data[:8] + _BFLOAT16.sub(rb'\1"U16" ', header) + data[end:])
    for name, entry in strict_json.loads(header).items():
        if entry.get("dtype") == "BF16":
            arrays[name] = (arrays[name].astype(np.uint32) << 16).view(np.float32)  # the upper half of a float32
    return arrays


def check_readable(path: Path) -> None:
    """Refuse a file that does not exist, is not regular or cannot be opened, before the run does any work."""
    try:
        os.close(regular(path, os.O_RDONLY))
    except OSError as error:
        raise UserError(f"expected a file of weights at {path}: {error.strerror}; take another one") from None
