"""Data sets in files of many samples each, read through an index; shared by TFRecord files and tar archives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset, hold_out
from allstep.common.data.datasets.files import unpack_once, unpacked
from allstep.common.data.formats.arrays import inputs_of, targets_of
from allstep.common.data.formats.labels import MAX_NAME_CHARACTERS
from allstep.common.data.formats.parts import find_parts
from allstep.common.data.formats.sample_index import Located, SampleIndex, build_index, open_index
from allstep.common.data.formats.task_inference import describe
from allstep.common.data.images.decoding import UnreadableImage
from allstep.common.data.images.encoded import MEAN, STD, encoded_splits, prepare_decoding
from allstep.common.data.passed_over import PassedOver


class Damaged(ValueError):
    """Bytes that are not an intact sample; the message gives the reason."""


@dataclass(frozen=True)
class SampleFormat:
    """File format with many samples per file."""

    suffixes: tuple[str, ...]
    scan: Callable[[Path, DataConfig, PassedOver], Iterator[Located]]
    """Function that finds the samples of a file, and counts what it passes over. Raises UserError if the file is
    damaged."""
    input_of: Callable[[bytes, DataConfig], bytes | np.ndarray]
    """Function from a sample's bytes to its input: the bytes of an image file, or numbers. Raises Damaged."""
    tokens_of: Callable[[bytes, DataConfig], np.ndarray]
    """Function from a sample's bytes to its input and target (2, ...), if both are tokens. Raises Damaged."""


def prepare_indexes(config: DataConfig, samples: SampleFormat) -> None:
    """Build the indexes of both splits, which later runs with the same files reuse.

    Raises UserError if there are no files, or one is damaged or holds something else.
    """
    passed = PassedOver()
    for packed in find_parts(config, samples.suffixes, passed):
        for path in packed:
            unpack_once(path, config)
        if paths := [unpacked(path, config) for path in packed]:
            passed.update(build_index(paths, lambda path, inside: samples.scan(path, config, inside), config))
    passed.tell(config.dataset)


def load_indexed(config: DataConfig, samples: SampleFormat) -> Dataset:
    """Load the data set whose indexes `prepare_indexes` has built.

    Raises UserError if an index is missing, and as `describe` does.
    """
    train, validation = (
        IndexedSamples(open_index([unpacked(path, config) for path in paths], config), samples, config)
        if paths
        else None
        for paths in find_parts(config, samples.suffixes, PassedOver())
    )
    assert train is not None  # find_parts has found it
    scale = None
    if isinstance(train.value(0), bytes):
        prepare_decoding(config)
        splits = encoded_splits(train, validation or train, config)
        scale = MEAN, STD
    else:
        splits = NumbersSplit(train), NumbersSplit(validation or train)
    splits = hold_out(*splits, config, config.dataset, has_own=validation is not None)
    return describe(*splits, where=config.dataset, task=config.task, scale=scale)


class IndexedSamples:
    """Samples of a split that are read through an index."""

    def __init__(self, index: SampleIndex, samples: SampleFormat, config: DataConfig) -> None:
        self.index, self.config, self.name = index, config, index.name
        self._value_of = samples.tokens_of if index.targets is None else samples.input_of

    @property
    def labels(self) -> np.ndarray:
        """Targets of images."""
        assert self.index.targets is not None  # `located` takes no tokens for them
        return self.index.targets

    def value(self, index: int) -> bytes | np.ndarray:
        """Return the input of a sample, or the result of `tokens_of` if the index has no targets. Raises Damaged."""
        return self._value_of(self.index.content(index), self.config)

    def content(self, index: int) -> bytes:
        try:
            value = self.value(index)
        except (Damaged, OSError) as error:
            raise UnreadableImage(error) from error
        if not isinstance(value, bytes):
            raise UnreadableImage("it is numbers, where the first sample is an image")
        return value


class NumbersSplit:
    """Split whose inputs are numbers of one shape and type.

    If the inputs are tokens, `inputs` has the smallest and largest token of each sample, which `describe` needs.
    """

    parallel = True

    def __init__(self, samples: IndexedSamples) -> None:
        self.samples, self.targets, self.inputs = samples, samples.index.targets, samples.index.token_ranges
        self.like = self._value(0)

    def __len__(self) -> int:
        return len(self.samples.index.records)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        values = np.empty((len(indices), *self.like.shape), self.like.dtype)
        for number, index in enumerate(np.asarray(indices).tolist()):
            value = self._value(index)
            if (value.shape, value.dtype) != (values.shape[1:], values.dtype):
                raise UserError(
                    f"expected {values.dtype} of shape {values.shape[1:]}, as in the first sample, in "
                    f"{self.samples.name(index)}, received {value.dtype} of shape {value.shape}; make the samples alike"
                )
            values[number] = value
        where = self.samples.config.dataset
        if self.targets is not None:
            return inputs_of(values, f"the inputs of {where}", indices), self.targets[indices]
        inputs, targets = np.ascontiguousarray(values.swapaxes(0, 1))
        return inputs_of(inputs, f"the inputs of {where}"), targets_of(targets, f"the targets of {where}")

    def _value(self, index: int) -> np.ndarray:
        try:
            value = self.samples.value(index)
        except (Damaged, OSError) as error:
            raise UserError(
                f"expected a sample in {self.samples.name(index)}, received a damaged one: {error}; write it again"
            ) from error
        if isinstance(value, bytes):
            raise UserError(
                f"expected numbers in {self.samples.name(index)}, as in the first sample, received an image; give all "
                "samples the same kind of input"
            )
        return value


def located(offset: int, length: int, value: object, target: object, where: str) -> Located:
    """Return the index entry of a sample with this input and target.

    Raises UserError if the target is neither a class, nor finite numbers, nor tokens.
    """
    if not _is_tokens(value):
        return Located(offset, length, _target_of(target, where))
    if _is_tokens(target) and value.shape == target.shape != (1,):
        return Located(offset, length, None, (min(value.min(), target.min()), max(value.max(), target.max())))
    return Located(offset, length, _target_of(target, where), (value.min(), value.max()))


def _is_tokens(value: object) -> TypeGuard[np.ndarray]:
    """Return whether `inputs_of` would treat the value as tokens."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.dtype == np.uint8:
        return False
    return value.size > 0 and value.ndim == 1


def _target_of(value: object, where: str) -> int | tuple[float, ...] | str:
    if isinstance(value, bytes) and (name := _name_in(value)):
        return name
    if isinstance(value, np.ndarray) and value.size:
        if value.dtype.kind in "biu" and value.size == 1:
            return int(value.item())
        is_one_hot = value.dtype.kind in "biu" and np.isin(value, (0, 1)).all() and value.sum() == 1
        if is_one_hot or (value.dtype.kind == "f" and np.isfinite(value).all()):
            return tuple(value.astype(float).ravel().tolist())
    raise UserError(
        f"expected a whole number or a name (a class), a one-hot row, finite fractions, or as many tokens as in the "
        f"input, as the target in {where}, received {quote(value)}; name another --target-field, or correct it"
    )


def _name_in(data: bytes) -> str | None:
    """Return the name of a class that stands in a file or a record, or None."""
    try:
        name = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return None
    is_json = name.startswith(("{", "["))  # of which a part may be the class
    return name if name.isprintable() and len(name) <= MAX_NAME_CHARACTERS and not is_json else None
