"""CentralStorageStrategy: one process, the weights on the CPU, every device reads them for its part of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from allstep.tensorflow.strategies.distribute import LocalDevices


class CentralStorage(LocalDevices):
    """The five steps in tf.distribute.experimental.CentralStorageStrategy; steps 3 and 4 are TensorFlow's."""

    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        return tf.distribute.experimental.CentralStorageStrategy(devices, parameter_device="/CPU:0")

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        # All devices share one variable, and TensorFlow has to know what becomes of the values that they give it: the
        # running statistics of batch norm, Keras' own included, and the states from which dropout draws.
        with self.strategy.scope(), tf.variable_creator_scope(_aggregated):
            yield


def _aggregated(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    if options["trainable"] is False and options["aggregation"] == tf.VariableAggregation.NONE:
        is_averaged = tf.as_dtype(options["dtype"]).is_floating
        aggregation = tf.VariableAggregation
        options["aggregation"] = aggregation.MEAN if is_averaged else aggregation.ONLY_FIRST_REPLICA
    return create(**options)
