"""What the rest of allstep knows of a data set: two splits of samples, what is learnt of them, how they are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # flags are read without NumPy, which would take 0.1 s of every mistake and of --help
    import numpy as np

    from allstep.common.data.curriculum import Curriculum
    from allstep.common.data.images.augmented_split import Augmentation

InputType = Literal["uint8", "float32", "int64"]
Task = Literal["classification", "regression", "next-token"]


class Split(Protocol):
    """Samples that can be read in any order, any number at a time."""

    parallel: bool
    """True where reading is slow (images are decoded), so that the loader should read ahead in a thread."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, ...) and targets (n, ...) of n sample indices; the data set says their shapes and types.

        The result depends on the arguments alone; `epoch` (from 0) selects the augmentation, if there is any.
        """
        ...


@dataclass(frozen=True)
class Dataset:
    """A training and a validation split of samples of one shape.

    The worker scales inputs on the device, by the channels in their last axis: uint8 to `(x / 255 - mean) / std`,
    float32 to `(x - mean) / std`; int64 are tokens and stay as they are. Inputs of three axes are images; PyTorch's
    networks see their channels first.
    """

    train: Split
    validation: Split
    input_shape: tuple[int, ...]
    """Of one sample: (height, width, channels) of an image, (length,) of a text."""
    num_classes: int
    """How many numbers the network puts out, for each token where the task is next-token."""
    mean: tuple[float, ...] = (0.0,)
    """Of each channel, with uint8 scaled to 0..1; one for all of them does as well."""
    std: tuple[float, ...] = (1.0,)
    """The same."""
    curriculum: Curriculum | None = None
    """In which order the training samples come, where it is not that of `sharding`."""
    augmentation: Augmentation | None = None
    """What is done to them in training."""
    encoded: bool = False
    """Whether splits give `encoded.EncodedImage` as inputs, which the worker makes pixels of on its device."""
    input_type: InputType = "uint8"
    num_tokens: int = 0
    """int64: inputs are below it; 0 where that is not known."""
    task: Task = "classification"
    """Targets: int64 (n,), the classes; float32 (n, num_classes) in regression; int64 (n, length), the tokens that come
    after each one, in next-token."""

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return {"classification": (), "regression": (self.num_classes,), "next-token": self.input_shape}[self.task]

    @property
    def target_type(self) -> str:
        """Of the arrays of targets."""
        return "float32" if self.task == "regression" else "int64"

    @property
    def training_split(self) -> Split:
        """The training samples as training sees them; `train` has them as they are."""
        if self.augmentation is None:
            return self.train
        from allstep.common.data.images.augmented_split import AugmentedSplit

        return AugmentedSplit(self.train, self.augmentation)

    @property
    def mixes_targets(self) -> bool:
        """Whether training targets are shares of the classes, float32 (n, num_classes)."""
        return self.augmentation is not None and self.augmentation.mixes

    @property
    def output_shape(self) -> tuple[int, ...]:
        """What the network makes of one sample."""
        return (*self.input_shape, self.num_classes) if self.task == "next-token" else (self.num_classes,)


class ArraySplit:
    """A split whose samples lie in one array or memory map; reading a batch is one indexing operation."""

    parallel = False

    def __init__(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Takes inputs and targets (samples, ...)."""
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, indices: np.ndarray, *, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return self.inputs[indices], self.targets[indices]
