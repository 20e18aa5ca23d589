"""Forward and backward passes over a batch: one after another, as many as --accumulate-steps asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from allstep.common.catalog.network_outputs import no_gradient
from allstep.tensorflow.compat import in_training, layers_of
from allstep.tensorflow.losses import Measure
from allstep.tensorflow.networks.batch_norm import counted

if TYPE_CHECKING:
    from allstep.tensorflow.inputs import Inputs
    from allstep.tensorflow.observer import Observer

Gradients = Sequence[tf.Tensor | None]
"""Gradients of the trainable weights in the model's order; None for a weight that the loss does not depend on."""
LossAndGradients = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[tf.Tensor, Gradients]]
"""See `OnePass.__call__`."""


class OnePass:
    """A forward and a backward pass on one device."""

    def __init__(self, model: keras.Model, forward: Callable[..., tf.Tensor], inputs: Inputs, loss: Measure) -> None:
        """`forward` is the model, or another function that computes its outputs."""
        self._model, self._inputs, self._loss = model, inputs, loss
        self.forward: Callable[[tf.Tensor], tuple[Sequence[tf.Tensor], tf.Tensor]] = lambda inputs: (
            (),
            forward(inputs, **in_training(model)),
        )
        """Returns the outputs of layers whose gradients a trace observes, and those of the model."""
        self.see_layers: Callable[[Sequence[tf.Tensor]], None] = lambda gradients: None
        """Receives those gradients."""
        # Keras' batch norms, except synchronised ones, count the sample of weight 0 that pads an empty slice.
        over_all = {v.path for layer in layers_of(model) if "_moments" in vars(layer) for v in layer.variables}
        self._moving_averages = [
            v for v in model.non_trainable_variables if "moving_" in v.path and v.path not in over_all
        ]

    def __call__(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor) -> tuple[tf.Tensor, Gradients]:
        """Return the sum of the samples' losses, and the gradients of the sum times `loss_weight`; 0 if that is 0.

        Losses that layers add are multiplied by the number of samples, since Keras adds them to the mean loss.
        """
        counts = tf.sign(loss_weight)
        before = [tf.identity(variable.value) for variable in self._moving_averages]
        with tf.GradientTape() as tape, counted(counts):
            layers, outputs = self.forward(self._inputs(inputs))
            loss_sum = (self._loss(outputs, targets) + losses_of_layers(self._model, targets)) * counts
            loss = loss_sum * loss_weight
        for variable, value in zip(self._moving_averages, before, strict=True):
            variable.assign(tf.where(counts > 0, variable.value, value))
        # Keras 3 variables wrap TensorFlow's, and the tape knows only the latter.
        weights = [variable.value for variable in self._model.trainable_variables]
        found = tape.gradient(loss, [*weights, *layers])
        if all(one is None for one in found):
            raise no_gradient()
        # The gradient of an embedding is sparse (IndexedSlices): few rows on each rank, many over all.
        gradients = [None if one is None else tf.convert_to_tensor(one) for one in found]
        if layers:
            own = zip(gradients[len(weights) :], layers, strict=True)
            self.see_layers([tf.zeros_like(layer) if one is None else one for one, layer in own])
        return loss_sum, gradients[: len(weights)]


def losses_of_layers(model: keras.Model, targets: tf.Tensor) -> tf.Tensor | float:
    """Return what the layers of `model` have added to the loss in its last call, times the number of samples.

    Regularizers of weights and activities, and `add_loss`, whose sum Keras adds to the mean loss of a batch.
    """
    if not (added := model.losses):
        return 0.0
    sums = [tf.reduce_sum(tf.cast(one, tf.float32)) for one in added]
    return tf.add_n(sums) * tf.cast(tf.shape(targets)[0], tf.float32)


@dataclass(frozen=True)
class Passes:
    """The backward part of a step without --slices: passes whose gradients add up."""

    number: int
    variables: Sequence[keras.Variable]
    """Variables that have gradients."""
    one_pass: LossAndGradients
    observers: Sequence[Observer]

    def __call__(
        self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor
    ) -> tuple[tf.Tensor, Gradients, Mapping[str, tf.Tensor]]:
        """Return the sum of losses, the gradients, and the numbers that observers measure."""
        compute = self._pass if self.number == 1 else self._accumulated
        loss_sum, gradients, numbers = compute(inputs, targets, loss_weight)
        for observer in self.observers:
            observer.see_local(gradients)
        return loss_sum, gradients, numbers

    def _pass(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor) -> tuple:
        loss_sum, gradients = self.one_pass(inputs, targets, loss_weight)
        factor = loss_weight * tf.cast(tf.shape(targets)[0], tf.float32)
        numbers = {name: value for one in self.observers for name, value in one.see_pass(gradients, factor).items()}
        return loss_sum, gradients, numbers

    def _accumulated(self, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor) -> tuple:
        """Compute like `_pass`, over one part of the samples after another, so that memory for one part is enough."""
        present: list[bool] = []

        def add_pass(number: tf.Tensor, sums: tuple) -> tuple:
            loss_sum, gradients, numbers = self._pass(*cut(inputs, targets, loss_weight, number, self.number))
            present[:] = [one is not None for one in gradients]
            gradients = [zero if one is None else one for one, zero in zip(gradients, sums[1], strict=True)]
            return number + 1, tf.nest.map_structure(tf.add, sums, (loss_sum, gradients, numbers))

        zeros = [tf.zeros(variable.shape) for variable in self.variables]
        numbers = {name: tf.constant(0.0) for observer in self.observers for name in observer.measures}
        _, (loss_sum, gradients, numbers) = tf.while_loop(
            lambda number, _: number < self.number,
            add_pass,
            (0, (tf.constant(0.0), zeros, numbers)),
            parallel_iterations=1,
        )
        return loss_sum, [one if is_there else None for one, is_there in zip(gradients, present, strict=True)], numbers


def on_present(function: Callable[[list[Any]], Sequence[Any]], gradients: Gradients) -> Gradients:
    """Return `gradients` with those that are not None replaced by the results of `function` for all of them."""
    results = iter(function([one for one in gradients if one is not None]))
    return [None if one is None else next(results) for one in gradients]


def cut(
    inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, number: int | tf.Tensor, num_parts: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return part `number` of some samples, as `sharding.rank_slice` cuts them.

    Returns: inputs, targets, and the weight of their losses. It is `loss_weight`, or 0 for an empty part, which gets a
    sample that does not count, because convolutions need one.
    """
    size = tf.shape(targets)[0]
    start, stop = size * number // num_parts, size * (number + 1) // num_parts
    part = slice(start, tf.maximum(stop, start + 1))
    return inputs[part], targets[part], loss_weight * tf.cast(stop > start, tf.float32)
