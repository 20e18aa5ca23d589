"""Horovod's Keras callbacks that set the learning rate, with the names and arguments of `horovod.tensorflow.keras`."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from allstep.tensorflow.compat import rmsprop_momentums
from allstep.tensorflow.drop_in.collectives import native
from allstep.tensorflow.drop_in.replicas import InStep


class LearningRateScheduleCallback(InStep):
    """Set the learning rate to `initial_lr * multiplier(epoch)` in epochs [start_epoch, end_epoch).

    initial_lr: the factor of the multiplier.
    multiplier: a function of the epoch, or a constant c, which means c ** (epoch - start_epoch).
    end_epoch: None means to the end of training.
    staircase: set it once per epoch, by a whole epoch number; otherwise before every batch, by
        epoch + batch / steps_per_epoch.
    momentum_correction: when the learning rate changes, scale the velocity by the same ratio (Goyal et al. 2017,
        section 3). It affects SGD and RMSprop with momentum, whose velocity contains the learning rate.
    steps_per_epoch: required without `staircase` if Keras does not know it.

    `lr` in the epoch's logs is the learning rate of its last batch.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: int | None = steps_per_epoch
        self.current_epoch: int = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"Keras does not know the steps per epoch; pass `steps_per_epoch` to {type(self).__name__}"
                )
        super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_learning_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_learning_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_learning_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and new != old and (velocity := _velocity(optimizer)):
            _scale(velocity, tf.constant(new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` in `warmup_epochs` epochs, batch by batch.

    The gradual warm-up of Goyal et al. 2017, section 2.2: with size ranks and epoch counted in fractions up to the
    end of the batch, lr = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1).
    With `verbose=1`, rank 0 prints a line when the warm-up has finished.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None  # set when training begins
            epoch += 1.0 / self.steps_per_epoch
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose
        self._last_epoch = warmup_epochs - 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == self._last_epoch and hvd.rank() == 0:
            lr = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


def _velocity(optimizer: keras.optimizers.Optimizer) -> list[tf.Variable]:
    """Return the momentum slots that contain the learning rate; there are none before the first step builds them."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if not optimizer.built:
        return []
    if isinstance(optimizer, keras.optimizers.SGD):
        return [native(v) for v in optimizer.momentums]
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return [native(v) for v in rmsprop_momentums(optimizer)]
    return []


@tf.function
def _scale(variables: list[tf.Variable], ratio: tf.Tensor) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(ratio, variable.dtype))
