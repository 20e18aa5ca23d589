"""Activation checkpointing: blocks discard their activations and recompute them in the backward pass (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost")."""

from collections import Counter
from collections.abc import Callable

import keras
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import drawing_again, states
from allstep.tensorflow.compat import global_seed_generator, is_recomputed, layers_of

# A block of a ResNet has 7 to 11 operations, one of a vision transformer 8.
_MIN_OPERATIONS = 6


def forward_of(network: keras.Model, *, in_blocks: bool) -> Callable[..., tf.Tensor]:
    """Return a function that computes the network's outputs, block by block if blocks are recomputed.

    Recomputation reads weights again, and must do so before the optimizer changes them. `tf.recompute_grad` ensures
    that by an IdentityN around the gradients, which TensorFlow's graph optimizer may remove as redundant: some runs
    then got gradients of changed weights. So this turns that optimization off.

    Raises UserError if the blocks of a network cannot be found.
    """
    if in_blocks and len(getattr(network, "inputs", None) or ()) != 1:
        raise UserError(
            "expected a keras.Sequential or a functional model of one input for --recompute, received "
            f"{type(network).__name__}; leave it out"
        )
    if in_blocks or any(map(is_recomputed, layers_of(network))):  # by --recompute, or keras.RematScope
        tf.config.optimizer.set_experimental_options({"dependency_optimization": False})
    return RecomputedBlocks(network) if in_blocks else network


class RecomputedBlocks:
    """Network whose blocks keep only their inputs for the backward pass."""

    def __init__(self, model: keras.Model) -> None:
        """Cut `model` into blocks of 6 or more operations; a block ends where later operations need only one tensor."""
        model = keras.Model(model.inputs, model.outputs)  # converts a keras.Sequential
        ends = [model.inputs[0], *_ends(model), model.outputs[0]]
        self._blocks = [keras.Model(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True)]

    def __call__(self, inputs: tf.Tensor, *, training: bool) -> tf.Tensor:
        values = inputs
        for block in self._blocks:
            values = tf.recompute_grad(_forward(block, training=training))(values)
        return values


def _forward(block: keras.Model, *, training: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that computes a block; its second call starts from the state of the first, and keeps it."""
    began = []

    def forward(values: tf.Tensor) -> tf.Tensor:
        if not began:
            variables = [*block.non_trainable_variables, global_seed_generator().state]
            began.extend((states(), [(one, tf.identity(one.value)) for one in variables]))
            return block(values, training=training)
        with drawing_again(began[0]), keras.StatelessScope(began[1]):
            return block(values, training=training)

    return forward


def _ends(model: keras.Model) -> list[keras.KerasTensor]:
    """Return the tensors at which all blocks but the last end."""
    operations = [one for one in model.operations if not isinstance(one, keras.layers.InputLayer)]
    num_readers = Counter(id(tensor) for one in operations for tensor in keras.tree.flatten(one.input))
    waiting = Counter({id(model.inputs[0]): num_readers[id(model.inputs[0])]})
    ends, num_operations = [], 0
    for operation in operations[:-1]:
        waiting -= Counter(id(tensor) for tensor in keras.tree.flatten(operation.input))
        num_operations += 1
        if not waiting and num_operations >= _MIN_OPERATIONS:  # only this operation's output is still needed
            ends.append(operation.output)
            num_operations = 0
        waiting[id(operation.output)] = num_readers[id(operation.output)]
    return ends
