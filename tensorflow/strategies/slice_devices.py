"""Where a process computes its slices with --slices: on one device, or one slice on each of several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

SliceFunction = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""Inputs, targets and the weight of their losses -> a vector."""
Numbers = dict[str, tf.Tensor]


class SliceDevices(Protocol):
    """The devices of a process; the methods are called inside a compiled step."""

    @property
    def number(self) -> int:
        """How many they are."""
        ...

    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """What `function` makes of a slice on each device; `bounds`, (number, 2), are which samples it has."""
        ...

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        """Return the sums of what `function` returns on every device."""
        ...


class OneDevice:
    """The device on which all is computed."""

    number = 1

    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        begin, end = tf.unstack(bounds[0])
        return [function(inputs[begin:end], targets[begin:end], loss_weight)]

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        return function()


@dataclass(frozen=True)
class ReplicaDevices:
    """The devices of a strategy of tf.distribute."""

    strategy: tf.distribute.Strategy
    number: int

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
