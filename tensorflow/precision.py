"""Precision of a step, and steps whose gradients overflowed. `pytorch/precision.py` has the same classes.

Layers compute in the type of their Keras policy, which `models` sets.
"""

from collections.abc import Callable

import tensorflow as tf

from allstep.tensorflow.passes import Gradients, on_present

Update = Callable[[Gradients], None]
Unless = Callable[[tf.Tensor, Update, Gradients], None]
"""Takes a number, and calls a function with gradients unless the number is above 0."""


class Precision:
    """float32, tf32 and bf16: every step takes effect."""

    def unless_overflowed(self, gradients: Gradients, loss_scale: tf.Tensor, update: Update) -> tf.Tensor:
        """Call `update` with the averaged gradients; return a number above 0 where they overflowed."""
        update(gradients)
        return tf.constant(0)


class ScaledFp16(Precision):
    """fp16: gradients come multiplied by the loss scale; a step in which any of them overflows changes nothing."""

    def __init__(self, unless: Unless) -> None:
        self._unless = unless

    def unless_overflowed(self, gradients: Gradients, loss_scale: tf.Tensor, update: Update) -> tf.Tensor:
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(one)) for one in gradients if one is not None])
        overflow = tf.math.count_nonzero(~finite, dtype=tf.int32)

        def unscaled(gradients: Gradients) -> None:
            update(on_present(lambda present: [one / loss_scale for one in present], gradients))

        self._unless(overflow, unscaled, gradients)
        return overflow
