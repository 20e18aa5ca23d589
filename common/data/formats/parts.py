"""Selection of training and validation files in a folder, and of input and target fields in a sample."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig

VALIDATION_NAMES = ("val", "valid", "validation", "dev", "test")
"""Names of the validation split, in order of preference."""
_PART_IN_NAME = re.compile(rf"(?:^|[-_.])(train|{'|'.join(VALIDATION_NAMES)})(?=[-_.0-9])")

_INPUT_NAMES = (
    "x", "input", "inputs", "image", "images", "img", "image/encoded", "jpg", "jpeg", "png", "npy", "pixel_values",
    "features", "tokens", "input_ids",
)  # fmt: skip
_TARGET_NAMES = ("y", "label", "labels", "target", "targets", "cls", "class", "image/class/label", "fine_label")


def find_parts(
    config: DataConfig, suffixes: Sequence[str], *, leftovers: tuple[str, ...] = ()
) -> tuple[list[Path], list[Path]]:
    """Return training files and validation files, each sorted by name; the latter may be empty.

    The files are in train/ and val/ (or another of `VALIDATION_NAMES`), or have the split in their name, as in
    train-00000.parquet.

    Args:
        suffixes: suffixes of the data files; other files are ignored.
        leftovers: prefixes of files that are ignored in addition to hidden ones.

    Raises:
        UserError: there is no training file.
    """
    folder = config.path
    assert folder is not None  # only called for user data sets, which have a path
    if (folder / "train").is_dir():
        train = _files(folder / "train", suffixes, leftovers)
        folders = [folder / name for name in VALIDATION_NAMES if (folder / name).is_dir()]
        validation = _files(folders[0], suffixes, leftovers) if folders else []
        where = folder / "train"
    else:
        parts: dict[str, list[Path]] = {}
        for path in _files(folder, suffixes, leftovers):
            match = _PART_IN_NAME.search(path.name)
            parts.setdefault(match[1] if match else "", []).append(path)
        train = parts.get("train") or parts.get("", [])
        validation = next((parts[name] for name in VALIDATION_NAMES if name in parts), [])
        where = folder
    if not train:
        raise UserError(
            f"expected files {' or '.join(f'*{suffix}' for suffix in suffixes)} to train on in {where}, received none; "
            "name the folder that holds them"
        )
    return train, validation


def _files(folder: Path, suffixes: Sequence[str], leftovers: tuple[str, ...]) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(tuple(suffixes)) and not path.name.startswith((".", *leftovers))
    )


def choose_fields(names: Collection[str], config: DataConfig, where: str) -> tuple[tuple[str, ...], str]:
    """Return the input fields and the target field, from the flags or by usual names.

    Raises:
        UserError: a field that the flags name does not exist, or no field has a usual name.
    """
    inputs = config.input_fields or _usual(_INPUT_NAMES, names, "--input-fields", where)
    target = config.target_field or _usual(_TARGET_NAMES, names, "--target-field", where)[0]
    for name in (*inputs, target):
        if name not in names:
            raise UserError(
                f"expected a field {quote(name)} in {where}, received {_listed(names)}; name one of them by "
                f"{'--target-field' if name == target else '--input-fields'}"
            )
    return inputs, target


def _usual(usual: Sequence[str], names: Collection[str], flag: str, where: str) -> tuple[str, ...]:
    found = [name for name in usual if name in names]
    if not found:
        raise UserError(
            f"expected a field of a usual name ({', '.join(usual[:4])}, ...) in {where}, received {_listed(names)}; "
            f"name one by {flag}"
        )
    return (found[0],)


def _listed(names: Collection[str]) -> str:
    return quote(", ".join(sorted(map(str, names))) or "no fields")
