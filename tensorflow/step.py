"""One training step, from a batch to changed weights, and what changes averaged gradients: clipping, then noise.

`pytorch/step.py` reads the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.data.loader import Batch
from allstep.common.recipe.schedule import rate_factors
from allstep.common.recipe.weights import gradient_noise
from allstep.common.training.worker import StepResult
from allstep.tensorflow.compat import parts
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.observer import Observer
from allstep.tensorflow.passes import Gradients, Passes, on_present
from allstep.tensorflow.precision import Precision
from allstep.tensorflow.strategies.ordered_sum import Numbers
from allstep.tensorflow.strategies.reduction import Reduction

Change = Callable[[Gradients, tf.Tensor], Gradients]
"""Takes the averaged gradients and the number of earlier steps, and returns the changed gradients."""


class Step:
    """A training step. Its parts are chosen once, by `building.build_step`; optional parts have neutral bases.

    TensorFlow traces `compute` on each device of this process; with --slices, only `apply`.
    """

    start: Callable[[Batch, float, float], StepResult]
    """Starts the traced step, given batch, learning rate and loss scale."""

    def __init__(
        self,
        optimizer: keras.Optimizer,
        *,
        backward: Passes,
        reduction: Reduction,
        precision: Precision,
        changes: Sequence[Change],
        observers: list[Observer],
    ) -> None:
        rates: list[Any] = [part.learning_rate for part in parts(optimizer)]
        factors = rate_factors([float(rate.value.numpy()) for rate in rates])
        self.optimizer, self._rates = optimizer, list(zip(rates, factors, strict=True))
        self.backward, self.reduction, self.precision = backward, reduction, precision
        self.changes, self.observers = changes, observers

    def __call__(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        """See `common.training.worker.Worker.train_step`."""
        for observer in self.observers:
            observer.begin(batch, learning_rate)
        result = self.start(batch, learning_rate, loss_scale)
        for observer in self.observers:
            observer.end(result)
        return result

    def compute(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, loss_scale: tf.Tensor) -> Numbers:
        """Take a step on a device's samples."""
        loss_sum, gradients, numbers = self.backward(inputs, targets, loss_weight * loss_scale)
        return {"loss_sum": loss_sum, **numbers, **self.apply(gradients, loss_scale)}

    def apply(self, gradients: Gradients, loss_scale: tf.Tensor) -> Numbers:
        """Take the second half of a step, given the gradients of a device."""
        gradients = self.reduction(gradients)
        overflow = self.precision.unless_overflowed(gradients, loss_scale, self.reduction.updates(self._update))
        numbers = {name: number for observer in self.observers for name, number in observer.numbers().items()}
        return {"overflow": overflow, **numbers}

    def _update(self, gradients: Gradients) -> None:
        num_steps = tf.identity(cast("keras.Variable", self.optimizer.iterations).value)
        for observer in self.observers:
            observer.see_averages(gradients)
        for change in self.changes:
            gradients = change(gradients, num_steps)
        self.reduction.apply(gradients)
        for observer in self.observers:
            observer.see_updates(num_steps)

    def set_learning_rate(self, learning_rate: tf.Tensor) -> None:
        """Set the learning rate of the next step; called in the traced step, once for all devices."""
        for rate, factor in self._rates:
            rate.assign(learning_rate if factor == 1 else learning_rate * factor)


_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class Clip:
    """--clip-norm: scale all gradients down together so that their norm is at most this."""

    largest: float

    def __call__(self, gradients: Gradients, num_steps: tf.Tensor) -> Gradients:
        def clipped(present: list[tf.Tensor]) -> list[tf.Tensor]:
            factor = tf.minimum(1.0, self.largest / (tf.linalg.global_norm(present) + _TINY))
            return [gradient * factor for gradient in present]

        return on_present(clipped, gradients)


@dataclass(frozen=True)
class Noise:
    """--gradient-noise: add noise of variance `eta` / (1 + step)^0.55, a function of seed, step and weight."""

    eta: float
    weights: Sequence[CanonicalWeight]
    """Weights that have gradients, in the model's order."""
    seed: int

    def __call__(self, gradients: Gradients, num_steps: tf.Tensor) -> Gradients:
        noises = tf.numpy_function(self._noises, [num_steps], [tf.float32] * len(self.weights), stateful=False)
        return [
            None if gradient is None else gradient + tf.ensure_shape(noise, gradient.shape)
            for gradient, noise in zip(gradients, noises, strict=True)
        ]

    def _noises(self, step: np.ndarray) -> list[np.ndarray]:
        flags = {"eta": self.eta, "seed": self.seed, "step": int(step)}
        return [
            weight.from_canonical(gradient_noise(weight.name, weight.canonical_shape, **flags))
            for weight in self.weights
        ]
