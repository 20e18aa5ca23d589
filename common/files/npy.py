"""Reading of .npy arrays whose origin is unknown: the header is compared with the data before memory is allocated."""

from __future__ import annotations

import io
import math
from typing import IO

import numpy as np

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load_npy(data: bytes) -> np.ndarray:
    """Return the array in the content of an .npy file.

    Raises:
        ValueError: it is no such file, holds objects, or its header declares more than it has.
    """
    check_header(io.BytesIO(data), len(data))
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def check_header(stream: IO[bytes], num_bytes: int) -> None:
    """Check the header at the start of a stream of `num_bytes` bytes.

    Raises:
        ValueError: it is none, or declares more than the stream has.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"its format is {version[0]}.{version[1]}, not one of arrays of numbers")
    shape, _, dtype = _READERS[version](stream)
    declared, left = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if min(shape, default=0) < 0 or declared > left:
        raise ValueError(f"its header declares {declared} bytes of shape {shape}, and {left} follow")
