"""Files of one number for each sample, class or the like: .npy arrays, or text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.files.npy import load_npy
from allstep.common.files.regular_file import read_regular

_LARGEST_FILE = 2**33  # a billion float64


def read_numbers(path: Path, flag: str, content: str) -> np.ndarray:
    """Return the finite numbers, float64 (n,), of a file that `flag` names.

    Args:
        content: what the file holds, as in "a number for each training sample".

    Raises:
        UserError: the file cannot be read, or does not have one axis of finite numbers.
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
