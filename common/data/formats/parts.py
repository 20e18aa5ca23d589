"""Files for training and for validation in a data set's folder; input and target fields of a sample."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.images.decoding import IMAGE_ENDINGS
from allstep.common.data.passed_over import PassedOver

HIDDEN = "hidden files"


def files_below(
    folder: Path, passed: PassedOver, *, within: Path | None = None, without: Path | None = None
) -> list[str]:
    """Return the relative paths of all files, folder by folder as torchvision's ImageFolder lists them.

    Links are followed, except to a folder around them. Broken links are listed, since they are files that cannot be
    read rather than absent ones. `within` is a folder around `folder` to which no link is followed, either; `without`
    is left out.
    """
    around = frozenset([_identity(within)] if within else [])
    found = sorted(_folders(folder, passed, around, without))
    return [os.path.join(inside, name) for inside, names in found for name in sorted(names)]


def folders_in(folder: Path, passed: PassedOver) -> list[str]:
    """Return the names of the folders in a folder; files beside them are counted as passed over."""
    names = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if is_hidden(entry.name):
            passed.add(HIDDEN, entry.name)
        elif os.path.isdir(entry.path):
            names.append(entry.name)
        else:
            passed.add("files beside the class folders", os.path.join(folder.name, entry.name))
    return names


def is_hidden(path: str) -> bool:
    """Return whether a file or a folder around it is hidden, such as .DS_Store, ._0.jpg and .git/."""
    return any(name.startswith(".") and name not in (".", "..") for name in path.split("/"))


def _folders(
    folder: Path, passed: PassedOver, around: frozenset, without: Path | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder's path relative to `folder`, and the names of its files."""
    pending, left_out = [("", around)], without and without.resolve()
    while pending:
        inside, around = pending.pop()
        here = os.path.join(folder, inside)
        if (identity := _identity(here)) in around:
            passed.add("links to a folder around them", inside)
            continue
        names = []
        for entry in os.scandir(here):
            if entry.name.startswith("."):
                passed.add(HIDDEN, os.path.join(inside, entry.name))
            elif entry.is_file(follow_symlinks=False) or not os.path.isdir(entry.path):
                names.append(entry.name)
            elif left_out is None or Path(entry.path).resolve() != left_out:
                pending.append((os.path.join(inside, entry.name), around | {identity}))
        yield inside, names


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


TRAINING_NAMES = ("train", "training")
VALIDATION_NAMES = ("val", "valid", "validation", "dev", "test", "testing", "eval", "evaluation")
"""Names of the validation split, in order of preference."""
TEST_NAMES = ("test", "testing")
PART = "|".join((*TRAINING_NAMES, *VALIDATION_NAMES))
_FOLDER = re.compile(PART, re.IGNORECASE)
_IN_NAME = re.compile(rf"(?:^|[-_. 0-9=])({PART})(?=[-_. 0-9]|$)", re.IGNORECASE)
_SHARD = re.compile(r"-\d+-of-\d+$")
UNNAMED = "unnamed"
"""Part of files and folders whose names contain none."""

_INPUT_NAMES = (
    "x", "input", "inputs", "image", "images", "img", "image/encoded", "jpg", "jpeg", "png", "npy", "pixel_values",
    "features", "tokens", "input_ids", *(ending[1:] for ending in IMAGE_ENDINGS),
)  # fmt: skip
TARGET_NAMES = ("y", "label", "labels", "target", "targets", "cls", "class", "image/class/label", "fine_label")


def find_parts(
    config: DataConfig,
    suffixes: Sequence[str],
    passed: PassedOver,
    *,
    companions: str = "",
    left_over: Callable[[Path], str] = lambda _: "",
) -> tuple[list[Path], list[Path]]:
    """Return training files and validation files, each sorted by path; the latter may be empty.

    The files are in folders of one of `TRAINING_NAMES` or `VALIDATION_NAMES`, or have the split in their name, as in
    train-00000.parquet, or in that of a folder, as in split=train/. Folders are searched to any depth, as
    Hugging Face's `datasets` does. Raises UserError if there is no training file.

    Args:
        suffixes: suffixes of the data files, in lower case.
        passed: counts the files that are in neither part.
        companions: pattern of names of other files that belong to the format.
        left_over: why a data file is none of the data set, or an empty text.
    """
    folder = config.path
    assert folder is not None  # only called for user data sets, which have a path
    found = []
    for path in files_below(folder, passed, without=config.data_dir / "derived"):
        name = os.path.basename(path)
        if _SHARD.sub("", name.lower()).endswith(tuple(suffixes)):
            if reason := left_over(folder / path):
                passed.add(reason, path)
            else:
                found.append(path)
        elif not re.fullmatch(companions, name):
            passed.add(f"files that are not {_any_of(suffixes)}", path)
    in_marked_folder = partial(_folder_part, part_in=marked_part)
    for part_of in (
        _folder_part,
        lambda path: marked_part(os.path.basename(path)),
        in_marked_folder,
        lambda _: UNNAMED,
    ):
        parts = _grouped(found, part_of)
        if parts.keys() & {*TRAINING_NAMES} or (parts.keys() - {UNNAMED} and part_of is not in_marked_folder):
            break
    train, validation = choose_parts(parts, passed, "files", config)
    if train is None:
        raise UserError(
            f"expected files {_any_of(suffixes)} to train on in {folder}, received none"
            f"{f', and passed over {passed}' if passed.found else ''}; name the folder that holds them"
        )
    train_files, validation_files = (
        sorted(map(Path, parts.get(name, []) if name else [])) for name in (train, validation)
    )
    return [folder / path for path in train_files], [folder / path for path in validation_files]


def choose_parts(
    parts: Mapping[str, Collection[str]], passed: PassedOver, what: str, config: DataConfig
) -> tuple[str | None, str | None]:
    """Return the names of the training part and of the validation part; None if there is none.

    Things without a part in their name are for training, unless others are named so. Of several validation parts, the
    first of `VALIDATION_NAMES` is taken. Raises UserError if the part that is asked for is missing.

    Args:
        what: plural of the things in the parts, for the line about those that are passed over.
        config: `validation_part` chooses among validation parts; if there is no training part, it is taken for both.
    """
    train = next((name for name in (*TRAINING_NAMES, UNNAMED) if name in parts), None)
    wanted = config.validation_part
    names = [name for name in VALIDATION_NAMES if wanted == "auto" or (name in TEST_NAMES) == (wanted == "test")]
    validation = next((name for name in names if name in parts), None)
    if wanted != "auto":
        if validation is None:
            found = ", ".join(sorted(name for name in parts if name != UNNAMED)) or "none that is named"
            raise UserError(f"expected a part {wanted} in {config.dataset}, received {found}; name another")
        train = train or validation
    chosen = " and ".join(name for name in (train, validation) if name not in (None, UNNAMED))
    for name in sorted(parts.keys() - {train, validation}):
        passed.add_all(f"{what} of other parts than {chosen}", sorted(parts[name]))
    return train, validation


def part_named(name: str) -> str:
    """Return the part for which a folder's name stands, or `UNNAMED`."""
    return name.lower() if _FOLDER.fullmatch(name) else UNNAMED


def _folder_part(path: str, part_in: Callable[[str], str] = part_named) -> str:
    """Return the part that the name of a folder around a file tells by `part_in`: the outermost, if several do."""
    return next((part for name in path.split(os.sep)[:-1] if (part := part_in(name)) != UNNAMED), UNNAMED)


def marked_part(name: str) -> str:
    """Return the part that stands in a name as a word, as in train2017, or `UNNAMED`."""
    match = _IN_NAME.search(name)
    return match[1].lower() if match else UNNAMED


def _grouped(paths: Sequence[str], part_of: Callable[[str], str]) -> dict[str, list[str]]:
    parts: dict[str, list[str]] = {}
    for path in paths:
        parts.setdefault(part_of(path), []).append(path)
    return parts


def _any_of(suffixes: Sequence[str]) -> str:
    return " or ".join(f"*{suffix}" for suffix in suffixes)


def choose_fields(
    names: Collection[str], config: DataConfig, where: str, passed: PassedOver
) -> tuple[tuple[str, ...], str]:
    """Return the input fields and the target field, from the flags or by usual names.

    Other fields are counted as passed over, unless the flags name both.
    Raises UserError if a field that the flags name does not exist, or no field has a usual name.
    """
    inputs = config.input_fields or _usual(_INPUT_NAMES, names, "--input-fields", where)
    target = config.target_field or _usual(TARGET_NAMES, names, "--target-field", where)[0]
    for name in (*inputs, target):
        if name not in names:
            raise UserError(
                f"expected a field {quote(name)} in {where}, received {_listed(names)}; name one of them by "
                f"{'--target-field' if name == target else '--input-fields'}"
            )
        if list(names).count(name) > 1:
            raise UserError(f"expected one field {quote(name)} in {where}, received several; rename them")
    others = [name for name in names if name not in (*inputs, target)]
    if others and not (config.input_fields and config.target_field):
        passed.add(f"fields besides {', '.join(inputs)} and {target}", ", ".join(others), len(others))
    return inputs, target


def _usual(usual: Sequence[str], names: Collection[str], flag: str, where: str) -> tuple[str, ...]:
    found = next((name for name in usual if name in names), None)
    if found is None:
        spelled = {name.lower(): name for name in names}
        found = next((spelled[name] for name in usual if name in spelled), None)
    if found is None:
        raise UserError(
            f"expected a field of a usual name ({', '.join(usual[:4])}, ...) in {where}, received {_listed(names)}; "
            f"name one by {flag}"
        )
    return (found,)


def _listed(names: Collection[str]) -> str:
    return quote(", ".join(sorted(map(str, names))) or "no fields")
