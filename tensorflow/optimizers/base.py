"""Base class of the suite's Keras optimizers: slots, and weight decay as part of each formula."""

from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from allstep.tensorflow.compat import variable_index


class Optimizer(keras.Optimizer):
    """Keras optimizer whose formula defines where `weight_decay` enters. Gradients must be dense.

    Biases and the scales of norms, which have fewer than two axes, do not decay and have no trust ratio. Weights that
    `exclude_from_weight_decay` names do not decay, either.
    """

    slots: dict[str, list[keras.Variable]]
    """State for each weight, by canonical names; available once the optimizer is built."""
    slot_names: Sequence[str] = ()

    def __init__(self, learning_rate: float = 0.0, **kwargs) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables: list[keras.Variable]) -> None:
        if not self.built:
            super().build(variables)
            made = self.add_optimizer_variables(variables, list(self.slot_names))
            self.slots = {name: list(slots) for name, slots in zip(self.slot_names, made, strict=True)}

    @property
    def num_steps(self) -> tf.Tensor:
        """Number of steps before this one."""
        return cast("keras.Variable", self.iterations).value

    def rates(self, learning_rate: tf.Tensor, dtype: tf.DType) -> Any:
        """Return the learning rate of a step for `update_step`, and other numbers that are the same for all weights."""
        return learning_rate

    def slot(self, name: str, variable: tf.Variable) -> tf.Variable:
        """Return the slot of that name of a weight."""
        return self.slots[name][variable_index(self, variable)].value

    def decay_of(self, variable: tf.Variable) -> float:
        """Return the weight decay factor of a weight."""
        decays = self.weight_decay and is_layer(variable) and self._use_weight_decay(variable)
        return self.weight_decay if decays else 0.0

    def with_decay(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Return the gradient plus the weight times its decay factor."""
        decay = self.decay_of(variable)
        return gradient + decay * variable if decay else gradient

    def _apply_weight_decay(self, variables: Sequence[keras.Variable]) -> None:
        """Do nothing: Keras would decouple the decay in every optimizer, but here it is in the formulas."""

    def _backend_update_step(
        self, grads: Sequence[tf.Tensor], trainable_variables: Sequence[keras.Variable], learning_rate: tf.Tensor
    ) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                raise TypeError(
                    f"expected dense gradients for {type(self).__name__}, received tf.IndexedSlices for "
                    f"{variable.name}; give it tf.convert_to_tensor of them"
                )
        grads = [
            tf.cast(gradient, variable.dtype) for gradient, variable in zip(grads, trainable_variables, strict=True)
        ]
        rates = self.rates(learning_rate, tf.as_dtype(trainable_variables[0].dtype))
        super()._backend_update_step(grads, trainable_variables, rates)


def is_layer(variable: tf.Variable) -> bool:
    """Return whether a weight has two axes or more, so that it is neither a bias nor the scale of a norm."""
    return len(variable.shape) > 1


def is_embedding(variable: keras.Variable) -> bool:
    """Return whether a weight belongs to an embedding, by the rule of Keras' Muon."""
    return "embedding" in variable.path.lower()


def norm(values: tf.Tensor) -> tf.Tensor:
    """Return the Euclidean norm, without copying the values."""
    return tf.sqrt(2 * tf.nn.l2_loss(values))


def ratio_of(numerator: tf.Tensor, denominator: tf.Tensor, *, holds: tf.Tensor) -> tf.Tensor:
    """Return a trust ratio, or 1 where `holds` is false."""
    return tf.where(holds, numerator / denominator, tf.ones_like(numerator))
