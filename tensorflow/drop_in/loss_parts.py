"""Check of the first batch of a `fit`: is its loss a mean over samples, so that each has the same weight in its half?

If not, the ranks' averages are not the gradients of the whole batch. So it is with sums, masks, weights that are
divided by their sum, and samples that are compared with each other.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.terminal import note
from allstep.tensorflow.compat import is_in_xla, layers_of


@cache
def is_due() -> tf.Variable:
    """Return the variable that is true from the start of a `fit` on several ranks until its first batch."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(tf.constant(False), trainable=False)


def checked(model: keras.Model, data: Any) -> Any:
    """Return the `data` of a training step, which waits for the check if it is due."""
    reduction, leaves = getattr(model.optimizer, "_reduction", None), tf.nest.flatten(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
    sizes = [tensor.shape[0] for tensor in keras.tree.flatten(getattr(model, "inputs", None) or [])]
    is_cut = len(tensors) == sum(leaf is not None for leaf in leaves) and not any(sizes)  # sparse batches are not
    has_batch_of_before = any(getattr(layer, "stateful", False) for layer in layers_of(model))
    is_average = reduction is not None and reduction.op == hvd.Average and hvd.size() > 1
    if not is_average or not is_cut or has_batch_of_before or is_in_xla():
        return data

    def check(*values: tf.Tensor) -> bool:
        if is_due():
            is_due().assign(False)
            given = iter(values)
            _tell(model, *(None if leaf is None else next(given) for leaf in leaves), like=data)
        return True

    if tf.executing_eagerly():
        check(*tensors)
        return data
    done = tf.cond(is_due(), lambda: tf.py_function(check, tensors, tf.bool), lambda: tf.constant(True))
    with tf.control_dependencies([done]):
        return tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)


def _tell(model: keras.Model, *leaves: tf.Tensor | None, like: Any) -> None:
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [tf.identity(variable.value) for variable in variables]
    x, *_ = keras.utils.unpack_x_y_sample_weight(tf.nest.pack_sequence_as(like, leaves))
    outputs: Any = model(x, training=False)
    flat, size = tf.nest.flatten(outputs), len(next(leaf for leaf in leaves if leaf is not None))

    def norm(count: int) -> float:
        """Return the norm of the gradient for the outputs of the first half of the samples, in a batch of `count`."""
        part = [leaf if leaf is None or count == size else leaf[:count] for leaf in leaves]
        x, y, weights = keras.utils.unpack_x_y_sample_weight(tf.nest.pack_sequence_as(like, part))
        own = flat if count == size else [one[:count] for one in flat]  # which have no mask
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = model.compute_loss(x=x, y=y, y_pred=tf.nest.pack_sequence_as(outputs, own), sample_weight=weights)
        found = [
            tf.convert_to_tensor(one)[: size // 2] for one in tape.gradient(cast("Any", loss), own) if one is not None
        ]
        return count * float(tf.linalg.global_norm(found)) if found else 0.0

    is_mean = np.isclose(norm(size), norm(size // 2), rtol=1e-3, equal_nan=True) if size > 1 else True
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    if hvd.rank() == 0 and not is_mean:
        note(
            "the loss of this model is not a mean over samples (but a sum, or has a mask, divides weights by their "
            "sum, or compares samples), so the average over ranks is not that of the whole batch; for a sum give "
            "hvd.DistributedOptimizer(op=hvd.Sum), for a mask sample_weight"
        )
