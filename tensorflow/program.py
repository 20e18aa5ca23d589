"""Training from a program of the user's own, in Keras. `pytorch/program.py` has the same for PyTorch.

    from allstep.tensorflow import Session
    history = Session(model, (x, y), (x_val, y_val), optimizer="adam", epochs=5).fit()

The same program runs alone and under horovodrun, mpirun and srun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from allstep.common.config.train_config import OWN_OPTIMIZER
from allstep.common.data.datasets import Dataset
from allstep.common.data.datasets.user_samples import as_dataset
from allstep.common.hooks import Hook
from allstep.common.launch.placement import placement
from allstep.common.own_parts import Parts
from allstep.common.process.errors import UserError
from allstep.common.program import as_rank, as_words, check, train
from allstep.common.start import start
from allstep.tensorflow import strategies
from allstep.tensorflow.compat import parts
from allstep.tensorflow.optimizers.state import KINDS
from allstep.tensorflow.strategies.strategy import share_cores
from allstep.tensorflow.train import session

if TYPE_CHECKING:
    from allstep.common.config.train_config import TrainConfig

# TensorFlow starts when the program makes its model: before the session could give this rank its share of the cores.
share_cores(placement())
_MORE_STATE = ("amsgrad", "centered", "use_ema")
"""Options with which an optimizer remembers more than its canonical slots."""


class Session:
    """A run of the user's own model on the user's own data; `fit` trains."""

    def __init__(
        self,
        model: keras.Model | Callable[[tuple[int, ...], int], keras.Model],
        train: Any,
        validation: Any = None,
        *,
        optimizer: str | keras.Optimizer | Callable[[], keras.Optimizer] = "sgd",
        hooks: Sequence[Hook] = (),
        **flags: Any,
    ) -> None:
        """What is trained, and how.

        Args:
            model: the network, or a function of the shape of a sample and the number of classes that builds it.
            train: inputs and targets as a pair of arrays; an object with `__len__` and
                `read(indices, epoch)`; or a `Dataset`, which has both parts.
            validation: the same, or None to hold out a share of `train`.
            optimizer: a name of `--optimizer`, or any optimizer of Keras' kind. Its learning rate is the flag base_lr.
                Strategies of tf.distribute need a function that builds it, and base_lr.
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
        own = None if isinstance(self._optimizer, str) else self._optimizer
        flags = {**({"optimizer": self._optimizer} if own is None else _flags_of(own)), **self._flags}
        if callable(own) and "base_lr" not in flags:
            raise UserError("a function that builds the optimizer needs base_lr, the first learning rate; give it")
        check(elastic=flags.get("elastic", False))  # before `start` says how an elastic job is started
        config, place = start(strategies, as_words(flags))
        check(elastic=config.parallel.elastic)  # of a file of flags
        training = session(config, place, self._hooks, Parts(self._dataset(config), self._model, own))
        return train(training) if training else []

    def _dataset(self, config: TrainConfig) -> Dataset:
        first, second = self._samples
        if isinstance(first, Dataset):
            return first
        return as_dataset(first, second, where="the samples", share=config.data.validation_share, seed=config.data.seed)


def _flags_of(optimizer: keras.Optimizer | Callable[[], keras.Optimizer]) -> dict[str, Any]:
    """Return the flags that tell what an optimizer of Keras does, as far as the run looks at them.

    Raises:
        UserError: names what the optimizer would do that is the run's to do.
    """
    if not isinstance(optimizer, keras.Optimizer):
        return {"optimizer": OWN_OPTIMIZER}
    name, _ = KINDS.get(type(optimizer), (OWN_OPTIMIZER, None))
    for part in parts(optimizer):
        kind, rate = type(part).__name__, part._learning_rate
        if isinstance(part, keras.optimizers.LossScaleOptimizer) or part.loss_scale_factor:
            raise UserError(f"{kind} cannot scale losses in a Session; give precision='fp16', which does")
        if part.gradient_accumulation_steps:
            raise UserError(f"{kind} cannot accumulate gradients in a Session; give accumulate_steps, which does")
        if not isinstance(rate, keras.Variable):
            raise UserError(
                f"expected {kind} with a number as its learning rate, received {type(rate).__name__}; give the Session "
                "warmup_epochs and decay"
            )
    rates = [float(part.learning_rate) for part in parts(optimizer)]
    # The rates of optimizers in a MultiOptimizer stay in proportion to the first that is not 0.
    flags = {"optimizer": name, "base_lr": next((rate for rate in rates if rate), 0.0)}
    has_momentum = name == "rmsprop" and optimizer.momentum
    if name == OWN_OPTIMIZER or has_momentum or any(getattr(optimizer, option, False) for option in _MORE_STATE):
        return {**flags, "optimizer": OWN_OPTIMIZER}
    momentum = {"momentum": optimizer.momentum} if name == "sgd" else {}
    name = "nesterov" if getattr(optimizer, "nesterov", False) else name
    return {**flags, "optimizer": name, "weight_decay": optimizer.weight_decay, **momentum}
