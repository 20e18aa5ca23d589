"""Training from a program of the user's own, in PyTorch. `tensorflow/session.py` has the same for Keras.

    from allstep.pytorch import Session
    history = Session(model, (x, y), (x_val, y_val), optimizer="adam", epochs=5).fit()

The same program runs alone and under horovodrun, mpirun, srun and torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from allstep.common.api.session import as_rank, as_words, check, train
from allstep.common.api.user_parts import Parts
from allstep.common.config.train_config import OWN_OPTIMIZER
from allstep.common.data.datasets import Dataset
from allstep.common.data.formats.user_samples import as_dataset
from allstep.common.training.hooks import Hook
from allstep.common.training.start import start
from allstep.pytorch import strategies
from allstep.pytorch.train import session

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig

_NAMES = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adamw",
    torch.optim.Adagrad: "adagrad",
    torch.optim.RMSprop: "rmsprop",
}
"""The optimizers whose state has the canonical names of that of `--optimizer`."""
_MORE_STATE = ("amsgrad", "centered")
"""Options with which they remember more than that."""


class Session:
    """A run of the user's own model on the user's own data; `fit` trains."""

    def __init__(
        self,
        model: torch.nn.Module | Callable[[tuple[int, ...], int], torch.nn.Module],
        train: Any,
        validation: Any = None,
        *,
        optimizer: str | torch.optim.Optimizer = "sgd",
        hooks: Sequence[Hook] = (),
        **flags: Any,
    ) -> None:
        """What is trained, and how.

        Args:
            model: the network, or a function of the shape of a sample and the number of classes that builds it.
            train: inputs and targets as a pair of arrays; a map-style data set of torch; an object with `__len__` and
                `read(indices, epoch)`; or a `Dataset`, which has both parts.
            validation: the same, or None to hold out a share of `train`.
            optimizer: a name of `--optimizer`, or any optimizer of torch's kind of the model's parameters. The first
                learning rate of its groups that is not 0 is the flag base_lr; the others stay in proportion to it.
            hooks: called at the moments of the run.
            flags: of the trainers, as keywords: epochs=5, strategy="ddp", base_lr=0.1, output_dir="runs/a", ...

        Raises:
            UserError: a flag, the data or the optimizer is not what it should be; alone, from `fit` at the latest.
        """
        self._model, self._optimizer, self._hooks = model, optimizer, hooks
        self._samples, self._flags = (train, validation), flags

    def fit(self) -> list[dict[str, Any]]:
        """Train, and return what each epoch has come to; every rank has the same.

        Alone it raises what goes wrong. As one of several ranks it says so and ends the process, so that the job ends.

        Raises:
            UserError: the input is wrong.
            Fault: the run cannot go on.
        """
        return as_rank(self._fit)

    def _fit(self) -> list[dict[str, Any]]:
        own = self._optimizer if isinstance(self._optimizer, torch.optim.Optimizer) else None
        flags = {**({"optimizer": self._optimizer} if own is None else _flags_of(own)), **self._flags}
        check(elastic=flags.get("elastic", False))  # before `start` says how an elastic job is started
        config, placement = start(strategies, as_words(flags))
        check(elastic=config.parallel.elastic)  # of a file of flags
        parts = Parts(self._dataset(config), self._model, own)
        training = session(config, placement, self._hooks, parts)
        return train(training) if training else []

    def _dataset(self, config: TrainConfig) -> Dataset:
        first, second = self._samples
        if isinstance(first, Dataset):
            return first
        train, validation = (Samples(part) if _is_torch(part) else part for part in (first, second))
        return as_dataset(
            train, validation, where="the samples", share=config.data.validation_share, seed=config.data.seed
        )


class Samples:
    """A map-style data set of torch as an object that reads samples by their indices."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def targets(self) -> Any:
        """All labels, where the data set has them at hand, as torchvision's do."""
        return getattr(self.samples, "targets", None)

    @property
    def num_classes(self) -> int | None:
        """Where it says so, or names its classes."""
        classes = getattr(self.samples, "classes", None)
        return getattr(self.samples, "num_classes", None) or (len(classes) if classes else None)

    def read(self, indices: Any, epoch: int) -> tuple[Any, Any]:
        """Inputs and targets; images, which torch has channels first, channels last."""
        inputs, targets = zip(*(self.samples[int(index)] for index in indices), strict=True)
        inputs = torch.stack([torch.as_tensor(value) for value in inputs])
        inputs = inputs.permute(0, 2, 3, 1) if inputs.ndim == 4 else inputs
        return inputs.numpy(), torch.stack([torch.as_tensor(value) for value in targets]).numpy()


def _is_torch(samples: Any) -> bool:
    return isinstance(samples, torch.utils.data.Dataset)


def _flags_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the flags that tell what an optimizer of torch does, as far as the run looks at them."""
    name, options = _NAMES.get(type(optimizer), OWN_OPTIMIZER), optimizer.defaults
    if any(options.get(option) for option in _MORE_STATE) or (name == "rmsprop" and options["momentum"]):
        name = OWN_OPTIMIZER
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    # Each group's rate stays in proportion to the first that is not 0.
    flags = {"optimizer": name, "base_lr": next((rate for rate in rates if rate), 0.0)}
    if name == OWN_OPTIMIZER:
        return flags
    momentum = {"momentum": options["momentum"]} if name == "sgd" else {}
    name = "nesterov" if options.get("nesterov") else name
    return {**flags, "optimizer": name, "weight_decay": options.get("weight_decay"), **momentum}
