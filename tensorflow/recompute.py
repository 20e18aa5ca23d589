"""Activation checkpointing: what a block has computed is forgotten, and computed again when backward needs it (Chen et
al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import keras
import tensorflow as tf

from allstep.tensorflow.networks.batch_norm import tracked

# A block of a ResNet has 7 to 11, one of a vision transformer 8, as many layers of VGG-16 lie between two poolings.
_MIN_OPERATIONS = 6


class RecomputedBlocks:
    """A network whose blocks keep nothing but their inputs for the backward pass."""

    def __init__(self, model: keras.Model) -> None:
        """Cut `model` into blocks: they end where a single tensor leads on, and have 6 operations or more."""
        model = keras.Model(model.inputs, model.outputs)  # of a keras.Sequential, too
        ends = [model.inputs[0], *_ends(model), model.outputs[0]]
        self._blocks = [keras.Model(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True)]

    def __call__(self, inputs: tf.Tensor, *, training: bool) -> tf.Tensor:
        values = inputs
        for block in self._blocks:
            values = tf.recompute_grad(_forward(block, training=training))(values)
        return values


def _forward(block: keras.Model, *, training: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """What computes a block, the first time with effect on running statistics, and then without."""
    is_first = True

    def forward(values: tf.Tensor) -> tf.Tensor:
        nonlocal is_first
        with tracked(is_first):
            is_first = False
            return block(values, training=training)

    return forward


def _ends(model: keras.Model) -> list[keras.KerasTensor]:
    """The tensors at which blocks end, but for the last block."""
    operations = [one for one in model.operations if not isinstance(one, keras.layers.InputLayer)]
    num_readers = Counter(id(tensor) for one in operations for tensor in keras.tree.flatten(one.input))
    waiting = Counter({id(model.inputs[0]): num_readers[id(model.inputs[0])]})
    ends, num_operations = [], 0
    for operation in operations[:-1]:
        waiting -= Counter(id(tensor) for tensor in keras.tree.flatten(operation.input))
        num_operations += 1
        if not waiting and num_operations >= _MIN_OPERATIONS:  # but for what this one gives
            ends.append(operation.output)
            num_operations = 0
        waiting[id(operation.output)] = num_readers[id(operation.output)]
    return ends
