"""Training from a program of the user's own, in Keras. `pytorch/session.py` has the same for PyTorch.

    from allstep.tensorflow import Session
    history = Session(model, (x, y), (x_val, y_val), optimizer="adam", epochs=5).fit()

The same program runs alone and under horovodrun, mpirun and srun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from allstep.common.api.session import as_rank, as_words, check, train
from allstep.common.api.user_parts import Parts
from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.common.data.formats.user_samples import as_dataset
from allstep.common.launch.placement import find_placement
from allstep.common.training.hooks import Hook
from allstep.common.training.start import start
from allstep.tensorflow import strategies
from allstep.tensorflow.strategies.strategy import share_cores
from allstep.tensorflow.train import session

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig

# Of Keras' optimizers the names of `--optimizer`, and the attributes that hold what each remembers.
_KINDS = {
    keras.optimizers.SGD: ("sgd", {"momentum": "momentums"}),
    keras.optimizers.Adam: ("adam", {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}),
    keras.optimizers.AdamW: ("adamw", {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}),
    keras.optimizers.Adagrad: ("adagrad", {"sum_of_squares": "_accumulators"}),
    keras.optimizers.RMSprop: ("rmsprop", {"square_avg": "_velocities"}),
}
# TensorFlow starts when the program makes its model: before the session could give this rank its share of the cores.
share_cores(find_placement())
_MORE_STATE = ("amsgrad", "centered")
_OF_OUR_OPTIMIZERS = ("clip_norm", "gradient_noise", "ema")


class Session:
    """A run of the user's own model on the user's own data; `fit` trains."""

    def __init__(
        self,
        model: keras.Model | Callable[[tuple[int, ...], int], keras.Model],
        train: Any,
        validation: Any = None,
        *,
        optimizer: str | keras.Optimizer = "sgd",
        hooks: Sequence[Hook] = (),
        **flags: Any,
    ) -> None:
        """What is trained, and how.

        Args:
            model: the network, or a function of the shape of a sample and the number of classes that builds it.
            train: inputs and targets as a pair of arrays; an object with `__len__` and
                `read(indices, epoch)`; or a `Dataset`, which has both parts.
            validation: the same, or None to hold out a share of `train`.
            optimizer: a name of `--optimizer`, or Keras' SGD, Adam, AdamW, Adagrad or RMSprop.
            hooks: called at the moments of the run.
            flags: of the trainers, as keywords: epochs=5, strategy="horovod", base_lr=0.1, output_dir="runs/a", ...

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
        own = self._optimizer if isinstance(self._optimizer, keras.Optimizer) else None
        flags = {**({"optimizer": self._optimizer} if own is None else _flags_of(own, self._flags)), **self._flags}
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
        return as_dataset(first, second, where="the samples", share=config.data.validation_share, seed=config.data.seed)


class _Slots:
    """What an optimizer of Keras remembers, by the canonical names, as those of `tensorflow/optimizers` have it."""

    def __init__(self, optimizer: keras.Optimizer, attributes: Mapping[str, str]) -> None:
        self._optimizer, self._attributes = optimizer, attributes

    def __getitem__(self, name: str) -> Sequence[keras.Variable]:
        return getattr(self._optimizer, self._attributes[name])


def _flags_of(optimizer: keras.Optimizer, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that say what an optimizer of Keras does, as far as the run looks at them."""
    name, attributes = _KINDS.get(type(optimizer), (None, {}))
    if name is None or any(getattr(optimizer, option, False) for option in _MORE_STATE):
        raise UserError(
            f"expected a name or one of Keras' {', '.join(kind.__name__ for kind in _KINDS)} as the optimizer, without "
            f"{' and '.join(_MORE_STATE)}, received {type(optimizer).__name__}; use one of them"
        )
    if given := [flag for flag in _OF_OUR_OPTIMIZERS if flags.get(flag)]:
        raise UserError(f"expected the name of an optimizer with {given[0]}, received one of Keras; name it")
    if name == "rmsprop" and optimizer.momentum:
        raise UserError("expected RMSprop without momentum, whose state is not kept, received it with; leave it out")
    optimizer.slots = _Slots(optimizer, attributes)
    name = "nesterov" if getattr(optimizer, "nesterov", False) else name
    momentum = {"momentum": optimizer.momentum} if name in ("sgd", "nesterov") else {}
    rate = float(optimizer.learning_rate)
    return {"optimizer": name, "base_lr": rate, "weight_decay": optimizer.weight_decay, **momentum}
