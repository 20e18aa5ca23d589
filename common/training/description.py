"""Description of the classes, samples and network of a run, which its checkpoints keep.

A resumed run is compared with it field by field; `allstep evaluate`, `load` and `export` build the network from it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from allstep.common.base.errors import UserError, quote
from allstep.common.base.version import VERSION
from allstep.common.catalog.losses import default_loss
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset, Split
from allstep.common.data.datasets.base import InputType, Task
from allstep.common.data.images.crop import CENTRE_FRACTION
from allstep.common.data.images.encoded import EncodedSplit
from allstep.common.files.strict_json import Count, Mismatch, from_json, number

MAX_NAME_BYTES = 2**24
"""Maximum size of all names of classes; a manifest has a limit, beyond which it is not read."""
_CLOSE = 1e-5
"""Relative difference of two means or deviations that are the same: machines round sums differently."""
_OF_DATASET = ("task", "num_classes", "input_shape", "input_type", "num_tokens", "vocabulary")
"""Fields that a description and a data set have by the same name."""


@dataclass(frozen=True)
class ImageFiles:
    """How pictures become samples in validation: RGB, cropped at the centre to `crop` of the shorter side, resized."""

    size: Count
    """Height and width in pixels."""
    crop: float
    exif_orientation: bool
    channels: str = "RGB"


@dataclass(frozen=True)
class Description:
    """Samples, preprocessing and network of a run."""

    task: Task
    classes: tuple[str, ...]
    """Names of the classes in the order of their numbers; none if the data set has no names."""
    num_classes: Count
    """Number of outputs of the network, per token if the task is next-token."""
    input_shape: tuple[Count, ...]
    """Shape of a sample, channels last."""
    input_type: InputType
    fields: tuple[str, ...] = ()
    """Names of a table's columns that are the inputs, and of the target."""
    mean: tuple[Annotated[float, number(-1e30)], ...] = (0.0,)
    std: tuple[Annotated[float, number(1e-30)], ...] = (1.0,)
    """Samples x become (x / scale - mean) / std, with a number for each channel, or one for all."""
    scale: Annotated[float, number(1e-30)] = 1.0
    """Divisor of pixels."""
    image_files: ImageFiles | None = None
    """How pictures become samples; None if samples are arrays."""
    num_tokens: int = 0
    vocabulary: str = ""
    """Characters in the order of their tokens; empty if tokens are bytes, or no characters."""
    loss: str = ""
    model: str = ""
    model_args: tuple[str, ...] = ()
    model_size: dict[str, int] = field(default_factory=dict)
    framework: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that trained."""
    allstep: str = ""
    """Version of allstep."""

    def dataset(self) -> Dataset:
        """Return a data set without samples, from which networks and inputs can be built."""
        none = cast("Split", ())
        shared = {name: getattr(self, name) for name in (*_OF_DATASET, "mean", "std")}
        return Dataset(none, none, class_names=self.classes, **shared)

    def class_name(self, index: int) -> str:
        """Return the name of a class, or its number if it has none."""
        return self.classes[index] if index < len(self.classes) else str(index)


def describe(config: TrainConfig, dataset: Dataset, *, framework: str, versions: Mapping[str, str]) -> Description:
    """Return the description of a run.

    Raises UserError if the names of the classes are longer than a checkpoint holds.
    """
    if sum(len(name.encode(errors="replace")) for name in dataset.class_names) > MAX_NAME_BYTES:
        raise UserError(f"the names of the classes have more than {MAX_NAME_BYTES} bytes in all; shorten them")
    return dataclasses.replace(
        described(dataset),
        loss=config.loss or default_loss(dataset.task),
        model=config.model,
        model_args=config.model_args,
        model_size=config.model_size,
        framework=framework,
        versions=dict(versions),
        allstep=VERSION,
    )


def described(dataset: Dataset) -> Description:
    """Return the description of a data set, without a network."""
    files = getattr(dataset.validation, "whole", dataset.validation)
    pictures = ImageFiles(files.size, CENTRE_FRACTION, files.turns) if isinstance(files, EncodedSplit) else None
    return Description(
        **{name: getattr(dataset, name) for name in (*_OF_DATASET, "fields")},
        classes=dataset.class_names,
        mean=tuple(map(float, dataset.mean)),
        std=tuple(map(float, dataset.std)),
        scale=255.0 if dataset.input_type == "uint8" else 1.0,
        image_files=pictures,
    )


def read_description(saved: Mapping[str, Any]) -> Description | None:
    """Return the description that a checkpoint holds; None if it was written before format 3.

    Raises Mismatch if it is damaged.
    """
    if not saved:
        return None
    found = from_json(Description, saved, "manifest.description")
    if found.classes and len(found.classes) != found.num_classes:
        raise Mismatch(f"expected {found.num_classes} classes, received the names of {len(found.classes)}")
    return found


def check_same(before: Description, now: Description, *, advice: str, only: Callable[[str], bool] = bool) -> None:
    """Raise UserError that names the first field in which descriptions of the data differ, and gives `advice`.

    `only` returns whether to compare a field of `Description`.
    """
    if only("classes") and before.classes and now.classes and before.classes != now.classes:
        raise UserError(f"{_classes_apart(before.classes, now.classes)}; {advice}")
    for name, title in _COMPARED.items():
        one, other = getattr(before, name), getattr(now, name)
        if only(name) and not _is_same(one, other):
            if name == "vocabulary":
                one, other = (sorted(set(text) - set(rest))[:1] for text, rest in ((one, other), (other, one)))
            raise UserError(f"expected {title} {_text(one)}, as the checkpoint has, received {_text(other)}; {advice}")


_COMPARED = {
    "task": "targets for",
    "num_classes": "a number of classes or outputs of",
    "input_shape": "samples of shape",
    "input_type": "samples of type",
    "fields": "the fields",
    "image_files": "pictures made to samples by",
    "scale": "pixels divided by",
    "mean": "a mean of",
    "std": "a standard deviation of",
    "vocabulary": "a vocabulary with",
    "num_tokens": "a number of tokens of",
}


def _classes_apart(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    if len(before) != len(now):
        changed = sorted(set(before) ^ set(now))
        which = f" ({'without' if changed[0] in before else 'with'} {quote(changed[0])})" if changed else ""
        return f"expected the {len(before)} classes of the checkpoint, received {len(now)}{which}"
    index = next(index for index, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
    return f"expected class {index} to be {quote(before[index])}, as the checkpoint has, received {quote(now[index])}"


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and one and isinstance(one[0], float):
        pairs = list(zip(one, other, strict=False))
        return len(one) == len(other) and all(math.isclose(*pair, rel_tol=_CLOSE, abs_tol=_CLOSE) for pair in pairs)
    return one == other


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(f"{item:.6g}" if isinstance(item, float) else str(item) for item in value) + ")"
    if isinstance(value, ImageFiles):
        turned = ", turned by EXIF" if value.exif_orientation else ""
        return f"{value.size} x {value.size} pixels{turned}"
    return str(value)
