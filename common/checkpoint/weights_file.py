"""Weights of somebody else's training: one safetensors file, as torchvision's and timm's networks can be saved in."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.files import decode_arrays
from allstep.common.files.regular_file import check_memory, regular
from allstep.common.files.schema import Mismatch
from allstep.common.files.strict_json import NotJson

_SUFFIX = ".safetensors"
_COUNT = ".num_batches_tracked"  # of PyTorch's batch norms, which ours do not keep


def is_weights_file(path: Path) -> bool:
    """Whether `path` names such a file, and not a checkpoint of ours."""
    return path.suffix == _SUFFIX


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """The arrays in `path` by their names, float32 where they were half or double precision.

    Raises:
        UserError: it cannot be read, or is no safetensors file.
    """
    from safetensors import SafetensorError

    try:
        with open(path, "rb", opener=regular) as stream:
            size = os.fstat(stream.fileno()).st_size
            check_memory(path, 2 * size)  # its content, and the arrays made of it
            arrays = decode_arrays(stream.read(size))
    except (OSError, NotJson, Mismatch, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"expected a readable file of weights at {path}: {reason}; take another one") from None
    weights = {name: array for name, array in arrays.items() if not name.endswith(_COUNT)}
    return {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in weights.items()}


def check_readable(path: Path) -> None:
    """Refuse what cannot be opened, before anything is spent on it.

    Raises:
        UserError: it is not there, or not a file.
    """
    try:
        os.close(regular(path, os.O_RDONLY))
    except OSError as error:
        raise UserError(f"expected a file of weights at {path}: {error.strerror}; take another one") from None
