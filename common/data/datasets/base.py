"""Interface of data sets: two splits, their shapes and types, the task, and the scaling; subsets of splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.passed_over import tell
from allstep.common.data.sharding import sample_order

if TYPE_CHECKING:
    from allstep.common.data.images.augmented_split import Augmentation


InputType = Literal["uint8", "float32", "int64"]
Task = Literal["classification", "regression", "next-token"]


class Split(Protocol):
    """Samples that can be read in any order, any number at a time."""

    parallel: bool
    """Whether reading is slow (e.g. images are decoded), so that the loader should prefetch in threads."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs (n, ...) and targets (n, ...) of n samples, with the data set's shapes and types.

        The result depends only on the arguments; `epoch` (from 0) selects the augmentation, if there is any.
        """
        ...


class Sampler(Protocol):
    """Order of the training samples in an epoch."""

    def order(self, positions: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, which depends on seed and epoch alone."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Training and validation split of samples of one shape.

    The worker normalizes inputs on the device, per channel (last axis): uint8 to `(x / 255 - mean) / std`, float32 to
    `(x - mean) / std`; int64 inputs are tokens and stay unchanged. Samples with three axes are images; PyTorch networks
    get them with channels first.
    """

    train: Split
    validation: Split
    input_shape: tuple[int, ...]
    """Shape of one sample: (height, width, channels) of an image, (length,) of a text."""
    num_classes: int
    """Number of outputs that the network needs, per token if the task is next-token."""
    mean: tuple[float, ...] = (0.0,)
    """Mean of each channel or field, or one for all of them, with uint8 scaled to 0..1."""
    std: tuple[float, ...] = (1.0,)
    """Standard deviation of each channel or field, or one for all of them, with uint8 scaled to 0..1."""
    sampler: Sampler | None = None
    """Order of the training samples, if it is not that of `sharding`."""
    class_weights: tuple[float, ...] = ()
    """Weight of each class in the training loss; none if all weigh the same."""
    augmentation: Augmentation | None = None
    """Augmentation of the training samples."""
    encoded: bool = False
    """Whether inputs are `encoded.EncodedImage`, which the worker decodes on its device."""
    input_type: InputType = "uint8"
    num_tokens: int = 0
    """Size of the vocabulary, if inputs are int64: all tokens are below it; 0 if it is not known."""
    task: Task = "classification"
    """Task, which determines the targets: classes, int64 (n,); in regression numbers, float32 (n, num_classes); in
    next-token the token that follows each input token, int64 (n, length)."""

    class_names: tuple[str, ...] = ()
    """Names of the classes in the order of their numbers, if the data set has names."""
    fields: tuple[str, ...] = ()
    """Names of the columns of a table that are the inputs, and of the target."""
    vocabulary: str = ""
    """Characters in the order of their tokens, if inputs are tokens of characters."""
    num_outputs: int = 0
    """Number of outputs of the network, once it is built; 0 for `num_classes`."""

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one sample's target."""
        return {"classification": (), "regression": (self.num_classes,), "next-token": self.input_shape}[self.task]

    @property
    def target_type(self) -> str:
        """Type of the target arrays."""
        return "float32" if self.task == "regression" else "int64"

    @property
    def training_split(self) -> Split:
        """Training samples with augmentation; `train` has them without."""
        if self.augmentation is None:
            return self.train
        from allstep.common.data.images.augmented_split import AugmentedSplit

        return AugmentedSplit(self.train, self.augmentation)

    @property
    def mixes_targets(self) -> bool:
        """Whether training targets are class probabilities, float32 (n, num_classes)."""
        return self.augmentation is not None and self.augmentation.mixes

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the network's output for one sample."""
        number = self.num_outputs or self.num_classes
        return (*self.input_shape, number) if self.task == "next-token" else (number,)


class ArraySplit:
    """Split whose samples are in one array or memory map; reading a batch is one indexing operation."""

    parallel = False
    in_memory = True
    fields: tuple[str, ...] = ()
    """See `Dataset.fields`."""

    def __init__(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Wrap inputs (samples, ...) and targets (samples, ...)."""
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[indices], self.targets[indices]


# An epoch number that training never uses, so that the choice of samples is independent of the order of any epoch.
_EPOCH = -1


class Subset:
    """Samples of a split at the given indices, in the order of the indices."""

    def __init__(self, split: Split, indices: np.ndarray) -> None:
        self.whole, self.indices = split, indices
        self.parallel = split.parallel
        # Those of the whole split, so that both subsets have the same classes and tokens.
        self.num_classes, self.num_tokens, self.inputs, self.class_names, self.fields = (
            getattr(split, name, None) for name in ("num_classes", "num_tokens", "inputs", "class_names", "fields")
        )

    @property
    def targets(self) -> np.ndarray | None:
        """Targets of the whole split."""
        return getattr(self.whole, "targets", None)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.whole.read(self.indices[indices], epoch=epoch)


def hold_out(
    train: Split, validation: Split, config: DataConfig, where: object, *, has_own: bool
) -> tuple[Split, Split]:
    """Return `train` without a share of its samples, and this share of `validation`: the same samples, not augmented.

    A data set that `has_own` validation part keeps both. The choice depends only on the number of samples, the share
    and the seed; both subsets have at least one sample. Raises UserError if there are fewer than two samples.
    """
    if has_own:
        if config.validation_share != DataConfig.validation_share:
            tell(f"--validation-share has no effect on {quote(where)}, which has a part to validate on; leave it out")
        return train, validation
    num_samples = len(train)
    if num_samples < 2:
        raise UserError(
            f"expected at least 2 samples in {where}, of which one is held out to validate, received {num_samples}; "
            "add samples"
        )
    order = sample_order(np.arange(num_samples), num_samples, seed=config.seed, epoch=_EPOCH)
    num_validation = min(max(1, round(config.validation_share * num_samples)), num_samples - 1)
    held, rest = np.sort(order[:num_validation]), np.sort(order[num_validation:])
    return Subset(train, rest), Subset(validation, held)
