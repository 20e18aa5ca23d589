"""Map-style data sets, as PyTorch has them: objects with `__len__` and `__getitem__`, which return a sample each.

A sample is an input and a target, or a mapping with fields for them: tensors, arrays, numbers, or Pillow's images.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from allstep.common.base.errors import UserError, note, quote, warn
from allstep.common.base.random_state import draws, seeded
from allstep.common.catalog.user_file import call_often
from allstep.common.config.data_config import DataConfig
from allstep.common.data.formats.arrays import channels_last, is_tensor, joined, plain
from allstep.common.data.formats.labels import class_names_of, labels_of, number_of
from allstep.common.data.formats.parts import choose_fields
from allstep.common.data.passed_over import PassedOver
from allstep.common.data.worker_processes import WorkerProcesses
from allstep.common.launch.placement import apparent_rank

_LOOKED_AT = 16
"""Number of samples whose targets are read to see whether floating-point numbers are those of classes."""
_MODES = ("L", "RGB", "RGBA")
_OTHER_BASES = {"IterableDataset", "PyDataset"}
"""Classes of PyTorch and Keras whose objects return streams or batches."""


def is_map_style(samples: Any) -> bool:
    """Return whether an object is a map-style data set, and neither an array nor a collection."""
    kind = type(samples)
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")) or hasattr(kind, "__array__"):
        return False
    if isinstance(samples, list):  # of samples, unless it may be inputs and targets
        return len(samples) > 2 and isinstance(samples[0], (tuple, Mapping))
    if isinstance(samples, (tuple, str, Mapping)):
        return False
    return not {base.__name__ for base in kind.__mro__} & _OTHER_BASES


@dataclass(frozen=True)
class _Found:
    """Facts about the samples, found from the first one."""

    fields: tuple[tuple[str, ...], str] | None = None
    """Names of the inputs and the target in samples that are mappings."""
    is_drawn: bool = True
    """Whether samples draw random numbers."""


class MapStyle:
    """Reads samples of a map-style data set by their indices, with images in channels last.

    Tensors have channels first, and so have arrays in data sets of PyTorch, whose loaders make tensors of them.
    """

    may_augment = True

    def __init__(self, samples: Any, config: DataConfig, where: str) -> None:
        """Look at the first sample, and find all labels: in the data set, or else by reading all samples once.

        Raises UserError if there are no samples, or a sample is not an input and a target.
        """
        self.samples, self.where, self._config = samples, where, config
        self._found = _Found()
        self._is_of_torch = any(base.__module__.startswith("torch.utils.data") for base in type(samples).__mro__)
        if not call_often(len, samples, flag=where):
            raise UserError(f"expected at least 1 sample in {where}, received none; add samples")
        self._turn = threading.Lock()
        number = config.data_workers
        self._workers = WorkerProcesses(self, number, where, "--data-workers") if number else None
        first, self._found = self._workers.call(self.look_at_first) if self._workers else self.look_at_first()
        self._all(self.targets_of, [len(self) - 1])  # __len__ may promise more than there is
        self.parallel = not self._found.is_drawn or self._workers is not None
        self.class_names = class_names_of(samples, self._target)
        self.num_classes = number_of(samples, "num_classes") or len(self.class_names) or None
        self.num_tokens = number_of(samples, "num_tokens")
        self.targets = self._labels(first) if self._may_be_class(first) else None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def _target(self) -> str | None:
        """Name of the target in samples that are mappings."""
        return self._found.fields and self._found.fields[1]

    def read(self, indices: np.ndarray, epoch: int) -> tuple[list[Any], list[Any]]:
        """Return inputs and targets of samples, each process reading one after the other: a data set need not be safe
        for threads."""
        pairs = self._all(self.pairs, [int(index) for index in indices], epoch)
        return [one for one, _ in pairs], [target for _, target in pairs]

    def pairs(self, numbers: list[int], epoch: int, found: _Found) -> list[tuple[Any, Any]]:
        """Return inputs and targets of samples, which this process reads."""
        self._found = found
        if not found.is_drawn and (read_all := self._reader()):
            return [self._pair(sample) for sample in self._fetched(read_all, numbers)]
        return [self._sample(number, epoch) for number in numbers]

    def targets_of(self, numbers: list[int], found: _Found) -> list[Any]:
        """Return the targets of samples, which this process reads."""
        self._found = found
        return [self._sample(number)[1] for number in numbers]

    def _all(self, method: Callable[..., list[Any]], numbers: list[int], *arguments: Any) -> list[Any]:
        """Return what a method returns for samples, by the processes that read or in this one."""
        if self._workers:
            return self._workers.split(method, numbers, *arguments, self._found)
        with self._turn:
            return method(numbers, *arguments, self._found)

    def _reader(self) -> Callable[[list[int]], Sequence[Any]] | None:
        """Return the method that reads several samples, which PyTorch's DataLoader calls where there is one."""
        return getattr(self.samples, "__getitems__", None)

    def look_at_first(self) -> tuple[Any, _Found]:
        """Return the target of the first sample, and find out which fields it has and whether samples are random.

        Generators are the process's, and so those of dropout: samples that draw are read between steps, or by other
        processes.
        """
        with seeded():
            before = draws()
            sample, target = self._pair(self._read(0))
            is_drawn = draws() != before
        if isinstance(target, tuple) and len({np.asarray(plain(one)).dtype.kind for one in target}) > 1:
            raise UserError(
                f"expected one target in each sample of {self.where}, received {quote(target)}; return one, or an array"
            )
        with seeded():
            again, _ = self._pair(self._read(0))
        if not np.array_equal(np.asarray(sample), np.asarray(again)) and apparent_rank() == 0:
            warn(
                f"{self.where} draws random numbers from a generator of its own, which no seed sets: its samples "
                "change with the number of ranks and after a resume; draw from random, numpy.random or torch"
            )
        if np.ndim(sample) == 0 and np.size(target) > 1 and apparent_rank() == 0:
            warn(
                f"each input of {self.where} is one number and each target {np.size(target)}: return the input first "
                "if they are the wrong way round"
            )
        return target, dataclasses.replace(self._found, is_drawn=is_drawn)

    def _may_be_class(self, first: Any) -> bool:
        """Return whether targets are classes: names, or numbers, which may be floating-point ones."""
        kind = np.asarray(first).dtype.kind
        if np.size(first) != 1 or kind not in "iubfUS":
            return False
        looked_at = list(range(min(len(self), _LOOKED_AT))) if kind == "f" else []
        looked_at = self._all(self.targets_of, looked_at)
        return all(np.size(target) == 1 and np.ravel(target)[0].is_integer() for target in looked_at)

    def _labels(self, first: Any) -> np.ndarray | None:
        labels, last = labels_of(self.samples, self._target), len(self) - 1
        is_text = isinstance(first, (str, bytes))
        looked_at = sorted({0, last // 2, last})
        if labels is not None and np.array_equal(labels[looked_at], np.ravel(self._all(self.targets_of, looked_at))):
            return labels
        if self.num_classes is not None and not is_text:
            return None
        if apparent_rank() == 0:
            note(f"all {len(self)} samples of {self.where} are read once for their labels")
        labels = self._all(self.targets_of, list(range(len(self))))
        if odd := [one for one in labels if isinstance(one, (str, bytes)) != is_text or np.size(one) != 1]:
            kind = "name" if is_text else "number"
            raise UserError(
                f"expected the {kind} of a class in each sample of {self.where}, as in the first, received "
                f"{quote(odd[0])}; correct it"
            )
        return np.array(labels).reshape(len(self))

    def _sample(self, index: int, epoch: int = 0) -> tuple[Any, Any]:
        with seeded(self._config.seed, epoch, index) if self._found.is_drawn else contextlib.nullcontext():
            sample = self._read(index)
            return call_often(self._pair, sample, flag=self.where, expected=f"the fields of sample {index}")

    def _fetched(self, read_all: Callable[[list[int]], Sequence[Any]], numbers: list[int]) -> Sequence[Any]:
        samples = call_often(read_all, numbers, flag=self.where)
        if not isinstance(samples, (list, tuple)):
            raise UserError(
                f"expected __getitems__ of {self.where} to return a list of samples, received "
                f"{type(samples).__name__}; return one"
            )
        return samples

    def _read(self, index: int) -> Any:
        if read_all := self._reader():
            return self._fetched(read_all, [index])[0]
        return call_often(self.samples.__getitem__, index, flag=self.where)

    def _pair(self, sample: Any) -> tuple[Any, Any]:
        if hasattr(sample, "_asdict"):  # a named tuple
            sample = sample._asdict()
        elif dataclasses.is_dataclass(sample):
            sample = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        if isinstance(sample, Mapping):
            inputs, target = self._found.fields or self._choose_fields(sample)
            values = [self._input(sample[name]) for name in inputs]
            if len(values) > 1:
                values = joined([np.asarray(value)[None] for value in values], self.where)
            return values[0], plain(sample[target])
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            received = f"{len(sample)} values" if isinstance(sample, (tuple, list)) else type(sample).__name__
            raise UserError(
                f"expected an input and a target, or a mapping of fields, in each sample of {self.where}, received "
                f"{received}; return these two"
            )
        return self._input(sample[0]), plain(sample[1])

    def _choose_fields(self, sample: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
        passed = PassedOver()
        fields = choose_fields(list(sample), self._config, self.where, passed)
        passed.tell(self.where)
        self._found = dataclasses.replace(self._found, fields=fields)
        return fields

    def _input(self, value: Any) -> Any:
        if hasattr(value, "getbands"):  # an image of Pillow
            if value.mode not in _MODES:
                raise UserError(
                    f"expected images in the modes {', '.join(_MODES)} in {self.where}, received {value.mode}; convert "
                    'them, as in image.convert("RGB")'
                )
            return np.asarray(value)
        try:
            array = np.asarray(plain(value))
        except ValueError:  # lists of different lengths
            array = np.array(None)
        if array.dtype == object or (
            isinstance(value, (list, tuple)) and any(is_tensor(one) or isinstance(one, np.ndarray) for one in value)
        ):
            raise UserError(
                f"expected one input of numbers in each sample of {self.where}, received {type(value).__name__}; make "
                "one array of it"
            )
        has_channels_first = array.ndim == 3 and (is_tensor(value) or self._is_of_torch)
        return channels_last(array, f"images in {self.where}") if has_channels_first else array
