"""Digests of a data set, by which a resumed run notices that it got other samples than the run before.

The labels are digested whole, and of the inputs a few samples, as they are stored: not decoded or augmented, which may
round differently on another machine. Where the files are makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from allstep.common.base.errors import UserError
from allstep.common.data.curriculum import Curriculum
from allstep.common.data.datasets import Dataset, Split
from allstep.common.data.datasets.subset import Subset
from allstep.common.data.images.decoding import UnreadableImage

_SAMPLES_LOOKED_AT = 64


def digests_of(dataset: Dataset) -> dict[str, str]:
    """Return a digest of each part of a data set, by the name of the part in error messages."""
    digests = {"class names": _hashed("\0".join(dataset.class_names).encode())} if dataset.class_names else {}
    for name, split in (("training", dataset.train), ("validation", dataset.validation)):
        digests[f"{name} labels"] = _hashed(_labels(split))
        if (inputs := _some_inputs(split)) is not None:
            digests[f"{name} inputs"] = _hashed(*inputs)
    if isinstance(dataset.sampler, Curriculum):
        digests["order of --curriculum"] = _hashed(dataset.sampler.easiest_first)
    return digests


def check_data(saved: Mapping[str, str], digests: Mapping[str, str]) -> None:
    """Check that a data set is that of a checkpoint, as far as both have a digest; old checkpoints have none.

    Raises:
        UserError: a part is another one; the message names it.
    """
    for name, digest in digests.items():
        if saved.get(name, digest) != digest:
            raise UserError(
                f"the {name} of the data set are not those with which the checkpoint was written; resume with the same "
                "data in the same order, or use --init-from for the weights alone"
            )


def _labels(split: Split) -> np.ndarray:
    if isinstance(split, Subset):
        return split.targets[split.indices] if split.targets is not None else _some(split, 1)
    targets = getattr(split, "targets", None)
    return targets if targets is not None else _some(split, 1)


def _some_inputs(split: Split) -> list[Any] | None:
    """Return the inputs of a few samples, as bytes or arrays; None if they may be drawn at random."""
    whole = split.whole if isinstance(split, Subset) else split
    if getattr(whole, "may_augment", False):
        return None
    images = getattr(whole, "images", None)
    if images is None:
        return [_some(split, 0)]
    chosen = _chosen(split)
    return [_content(images, index) for index in (split.indices[chosen] if isinstance(split, Subset) else chosen)]


def _content(images: Any, index: int) -> bytes:
    try:
        return images.content(int(index))
    except UnreadableImage:
        return b""


def _some(split: Split, part: int) -> np.ndarray:
    return split.read(_chosen(split), epoch=0)[part]


def _chosen(split: Split) -> np.ndarray:
    return np.linspace(0, len(split) - 1, min(len(split), _SAMPLES_LOOKED_AT)).astype(np.int64)


def _hashed(*values: bytes | np.ndarray) -> str:
    """Return the XXH3 hash of contents and lengths, in hexadecimal."""
    state = xxhash.xxh3_64()
    for value in values:
        array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.ascontiguousarray(value)
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()
