"""Samples of a user's program: handed over, or returned by the function of FILE.py:FUNCTION, called on every rank.

The function returns arrays: (x_train, y_train, x_validation, y_validation), or ((x_train, y_train), (x_test, y_test))
as Keras' data sets do, or (x, y), of which a share is held out for validation. Or it returns one object or a pair of
objects with `__len__` and `read(indices, epoch)`, or map-style data sets. Or it returns a `Dataset`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.catalog.user_file import call, call_often, import_function, parse
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import Dataset, Split, hold_out
from allstep.common.data.formats.arrays import array_split, channels_last, inputs_of, is_tensor, plain, targets_of
from allstep.common.data.formats.labels import names_in, number_of, torch_wrapper
from allstep.common.data.formats.map_style import MapStyle, is_map_style
from allstep.common.data.formats.task_inference import MAX_CLASSES, describe


def prepare(config: DataConfig) -> None:
    """Do nothing: every rank calls the function."""


def load(config: DataConfig) -> Dataset:
    """Import the file and call the function without arguments.

    Raises UserError if the function does not exist, fails, or returns something else.
    """
    where, file = config.dataset, parse(config.dataset)
    assert file is not None  # --dataset has the form FILE.py:FUNCTION
    samples = call(import_function(*file, "--dataset"), flag="--dataset")
    if isinstance(samples, Dataset):
        return samples
    return as_dataset(samples, None, config, where=where)


def _parts(samples: Any) -> tuple[Any, Any]:
    """Return training and validation samples; the latter may be None."""
    if isinstance(samples, (tuple, list)):
        if len(samples) == 4 and not is_map_style(samples):
            return tuple(samples[:2]), tuple(samples[2:])
        if len(samples) == 2 and all(_is_split(part) for part in samples):
            return samples[0], samples[1]
    return samples, None


def _is_split(part: Any) -> bool:
    if isinstance(part, (tuple, list)):  # not of labels
        return len(part) == 2 and all(hasattr(one, "__len__") for one in part)
    return hasattr(part, "read") or is_map_style(part) or _is_loader(part)


def _is_loader(samples: Any) -> bool:
    return is_map_style(getattr(samples, "dataset", None))


def as_dataset(train: Any, validation: Any, config: DataConfig, *, where: str) -> Dataset:
    """Build a data set from two splits, each in one of the forms of `as_split`.

    Raises UserError if a split is something else, and as `describe` does.

    Args:
        validation: None to take the second part of `train`, or to hold out a share of it.
        where: name of the data set in error messages.
        task: `DataConfig.task`.
    """
    if validation is None:
        train, validation = _parts(train)
    if config.data_workers and not is_map_style(train):
        raise UserError(f"--data-workers (data_workers) needs a map-style data set, and {where} is none; leave it out")
    split = as_split(train, where, config)
    held = split if validation is None else as_split(validation, where, config)
    parts = hold_out(split, held, config, where, has_own=validation is not None)
    return describe(*parts, where=where, task=config.task)


def as_split(samples: Any, where: str, config: DataConfig | None = None) -> Split:
    """Return a pair of arrays or tensors, a map-style data set, or an object with `read(indices, epoch)`, as a split.

    Raises UserError if `samples` is none of them, and as `array_split` and `MapStyle` do.
    """
    if hasattr(samples, "read") and hasattr(samples, "__len__"):
        return CheckedSplit(samples, where)
    if torch_wrapper(samples) == "TensorDataset" and len(samples.tensors) == 2:
        samples = samples.tensors
    if isinstance(samples, (tuple, list)) and len(samples) == 2:
        inputs, targets = samples
        array = np.asarray(plain(inputs)) if is_tensor(inputs) else inputs
        if is_tensor(inputs) and array.ndim == 4:
            array = channels_last(array, f"the inputs of {where}")
        return array_split(array, plain(targets), where)
    if is_map_style(samples):
        return CheckedSplit(MapStyle(samples, config or DataConfig(), where), where)
    received = f"{type(samples).__name__}, whose samples cannot be read by their number"
    if isinstance(samples, (tuple, list)):
        first = type(next(iter(samples), None)).__name__
        received = f"a {type(samples).__name__} of {len(samples)} objects ({first}, ...)"
    advice = _without_loader(samples) if _is_loader(samples) else "give one of them"
    raise UserError(
        f"expected {where} to be inputs and targets, a map-style data set, or an object with __len__ and "
        f"read(indices, epoch), received {received}; {advice}"
    )


def _without_loader(loader: Any) -> str:
    """Return advice for a DataLoader of torch: its data set, and what replaces the other parts of it."""
    parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "collate_fn")]
    lost = {getattr(one, "__name__", type(one).__name__) for one in parts} - _USUAL
    if getattr(parts[0], "replacement", False):
        lost.add(type(parts[0]).__name__)
    without = f"; {', '.join(sorted(lost))} would have no effect (see --sampler, --mixup and --cutmix)" if lost else ""
    return f"give its dataset{without}"


_USUAL = {"NoneType", "SequentialSampler", "RandomSampler", "DistributedSampler", "BatchSampler", "default_collate"}
"""Parts of a DataLoader that a run replaces by equal ones."""


class CheckedSplit:
    """Split that wraps a user's object with `__len__` and `read(indices, epoch)`, and checks what it returns."""

    def __init__(self, samples: Any, where: str) -> None:
        """Wrap `samples`, which may have `targets` (array of all targets) or `num_classes`, and `num_tokens`."""
        self.samples, self.where = samples, where
        self.parallel = getattr(samples, "parallel", True)
        self.num_classes, self.num_tokens = (number_of(samples, name) for name in ("num_classes", "num_tokens"))
        self.class_names = names_in(getattr(samples, "class_names", None))
        self.may_augment = getattr(samples, "may_augment", False)
        targets = getattr(samples, "targets", None)
        self.targets = None if targets is None else targets_of(targets, f"the targets of {where}")
        # `labels.Meaning.convert`, once it is known
        self.convert: Callable[[np.ndarray], np.ndarray] = lambda read: read

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = call_often(self.samples.read, indices, epoch=epoch, flag=self.where)
        inputs = inputs_of(inputs, f"the inputs of {self.where}", indices)
        targets = targets_of(targets, f"the targets of {self.where}", indices)
        if not len(inputs) == len(targets) == len(indices):
            raise UserError(
                f"expected read() of {self.where} to return {len(indices)} samples, as many as indices, received "
                f"{len(inputs)} inputs and {len(targets)} targets; correct it"
            )
        targets = self.convert(targets)
        self._check_range("labels", targets, self.num_classes, indices)
        self._check_range("tokens", inputs, self.num_tokens, indices)
        return inputs, targets

    def _check_range(self, what: str, values: np.ndarray, number: int | None, indices: np.ndarray) -> None:
        """Refuse classes, or tokens, that are not below their number."""
        if number and values.dtype == np.int64 and values.size:
            worst = int(np.argmax(np.where(values < 0, MAX_CLASSES, values)))
            if not 0 <= (value := values.flat[worst]) < number:
                raise UserError(
                    f"expected {what} from 0 to {number - 1} in {self.where}, received {value} in sample "
                    f"{indices[worst * len(values) // values.size]}; correct it, or their number"
                )
