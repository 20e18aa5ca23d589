"""Plain values and arrays on disk: a JSON file, and a .npy file for each array. Nothing is pickled."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular
from allstep.common.files.npy import load_npy

MAX_BYTES = 2**40
_VALUES = "values.json"
_ARRAY = "__array__"
"""Only key of the object that stands for an array; its value is the array's number."""
_PAIRS = "__pairs__"
"""Only key of the object that stands for a mapping with integer keys (as in torch's optimizers), or with one of these
marks as a key; its value is a list of pairs."""
_EARLIER_NUMBER = "__number__"
"""Counterpart of `strict_json.NON_FINITE` in files of allstep 0.1, which are read as well."""
_TUPLE = "__tuple__"
"""Only key of the object that stands for a tuple, as generators of random numbers need for their state."""
_MARKS = {_ARRAY, strict_json.NON_FINITE, _EARLIER_NUMBER, _PAIRS, _TUPLE}


def save(folder: Path, value: Any) -> None:
    """Write a value into a new folder.

    Raises UserError if it holds anything other than numbers, strings, booleans, None, arrays of numbers, and lists,
    tuples and mappings (with strings or integers as keys) of these, or if `load` would not read it.
    """
    arrays: list[np.ndarray] = []
    try:
        text = json.dumps(_plain(value, arrays))
        strict_json.loads(text.encode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"expected values that can be read again: {error}; save fewer in one another") from None
    folder.mkdir()
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array, allow_pickle=False)
    (folder / _VALUES).write_text(text)


def load(folder: Path) -> Any:
    """Return the value that `save` has written. Raises UserError if the folder holds no such value."""
    try:
        content = strict_json.loads(read_regular(folder / _VALUES, maximum=MAX_BYTES))
        return _restored(content, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"expected a value in {folder}, received something else: {error}; write it again") from error


def is_own_file(name: str) -> bool:
    """Return whether `save` writes files of that name."""
    return name == _VALUES or re.fullmatch(r"[0-9]+\.npy", name) is not None


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if hasattr(value, "detach"):  # a torch tensor on any device
        try:
            value = value.detach().cpu().numpy()
        except (TypeError, NotImplementedError, RuntimeError):  # of bfloat16, sparse, in shards, on no device
            kind = type(value).__name__
            raise _unknown(f"{kind} of {value.dtype} ({value.layout}, on {value.device})") from None
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and not np.ma.isMaskedArray(value):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {strict_json.NON_FINITE: repr(value)}
    if isinstance(value, list):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item, arrays) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        items = [(key, _plain(item, arrays)) for key, item in value.items()]
        as_object = all(isinstance(key, str) for key in value) and not value.keys() & _MARKS
        return dict(items) if as_object else {_PAIRS: items}
    raise _unknown(f"{type(value).__name__}{f' of {value.dtype}' if isinstance(value, np.ndarray) else ''}")


def _unknown(kind: str) -> UserError:
    return UserError(
        f"expected numbers, texts, arrays, and lists and mappings of these, received {kind}; convert it to one of them"
    )


def _restored(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_restored(item, folder) for item in value]
    if isinstance(value, dict) and value.keys() == {_ARRAY}:
        return load_npy(read_regular(folder / f"{int(value[_ARRAY])}.npy", maximum=MAX_BYTES))
    if isinstance(value, dict) and value.keys() == {_TUPLE}:
        return tuple(_restored(item, folder) for item in value[_TUPLE])
    if isinstance(value, dict) and value.keys() == {_PAIRS}:
        return {key: _restored(item, folder) for key, item in value[_PAIRS]}
    if isinstance(value, dict) and len(value) == 1 and value.keys() <= {strict_json.NON_FINITE, _EARLIER_NUMBER}:
        return float(*value.values())
    if isinstance(value, dict):
        return {key: _restored(item, folder) for key, item in value.items()}
    return value
