"""Reading of .npy arrays whose origin is unknown: the header is compared with the data before memory is allocated.

Files of numbers, such as one for each sample or class, are .npy arrays or text.
"""

import io
import math
from pathlib import Path
from typing import IO

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.files.disk import read_regular

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def load_npy(data: bytes) -> np.ndarray:
    """Return the array in the content of an .npy file.

    Raises ValueError if it is no such file, holds objects, or its header declares more than it has.
    """
    check_header(io.BytesIO(data), len(data))
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def check_header(stream: IO[bytes], num_bytes: int) -> None:
    """Check the .npy header at the start of a stream of `num_bytes` bytes.

    Raises ValueError if there is none, or it declares more than the stream has.
    """
    version = np.lib.format.read_magic(stream)
    if version not in _READERS:
        raise ValueError(f"its format is {version[0]}.{version[1]}, not one of arrays of numbers")
    shape, _, dtype = _READERS[version](stream)
    if dtype.hasobject:
        raise ValueError("it holds objects of Python; convert it to an array of numbers or texts, as by .astype(str)")
    declared, left = math.prod(shape) * dtype.itemsize, num_bytes - stream.tell()
    if min(shape, default=0) < 0 or declared > left:
        raise ValueError(f"its header declares {declared} bytes of shape {shape}, and {left} follow")


_LARGEST_FILE = 2**33  # a billion float64


def read_numbers(path: Path, flag: str, content: str) -> np.ndarray:
    """Return the finite numbers, float64 (n,), of a file that `flag` names.

    `content` is what the file holds, as in "a number for each training sample". Raises UserError if the file cannot be
    read, or does not have one axis of finite numbers.
    """
    try:
        read = read_regular(path, maximum=_LARGEST_FILE)
        numbers = load_npy(read).astype(np.float64) if path.suffix == ".npy" else np.array(read.split(), np.float64)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(
            f"expected {flag} to be a file of {content}, received {quote(path)}: {reason}; name another"
        ) from None
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        raise UserError(
            f"expected {flag} to hold {content}, received {quote(path)} with {numbers.size} numbers, of which "
            f"{np.count_nonzero(np.isfinite(numbers))} are finite, in {numbers.ndim} axes; correct the file"
        )
    return numbers
