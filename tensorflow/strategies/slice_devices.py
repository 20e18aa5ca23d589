"""Devices on which a process computes its slices with --slices: one, or several with one slice each at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

SliceFunction = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""Inputs, targets and the weight of their losses -> a vector."""
Numbers = dict[str, tf.Tensor]


class SliceDevices:
    """The devices of a process: here the one on which all is computed. Methods are called inside a compiled step."""

    number: int = 1

    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Return what `function` returns for a slice on each device; `bounds` (number, 2) has the samples of each."""
        begin, end = tf.unstack(bounds[0])
        return [function(inputs[begin:end], targets[begin:end], loss_weight)]

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        """Return the sums of what `function` returns on every device."""
        return function()


class ReplicaDevices(SliceDevices):
    """The devices of a strategy of tf.distribute."""

    def __init__(self, strategy: tf.distribute.Strategy, number: int) -> None:
        self.strategy, self.number = strategy, number

    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        def on_device() -> tf.Tensor:
            device = tf.distribute.get_replica_context().replica_id_in_sync_group
            begin, end = tf.unstack(bounds[device % self.number])
            return function(inputs[begin:end], targets[begin:end], loss_weight)

        return self.strategy.experimental_local_results(self.strategy.run(on_device))

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        results = self.strategy.run(function)
        return tf.nest.map_structure(lambda value: tf.add_n(self.strategy.experimental_local_results(value)), results)
