"""What is done to the averaged gradient before the optimizer takes it: clipping and, after it, noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from allstep.common.config.train_config import OptimizerConfig
from allstep.common.recipe.gradient_noise import gradient_noise
from allstep.tensorflow.models import CanonicalWeight

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class GradientChanges:
    """The changes that the flags ask for; `gradients` of `pytorch/` has the same."""

    flags: OptimizerConfig
    seed: int
    """Of the noise."""
    weights: Sequence[CanonicalWeight]
    """Those that have gradients, in the model's order."""

    def __call__(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """What the optimizer takes in place of the gradients.

        Args:
            step: steps taken before this one.
        """
        if self.flags.clip_norm is not None:
            factor = tf.minimum(1.0, self.flags.clip_norm / (tf.linalg.global_norm(gradients) + _TINY))
            gradients = [gradient * factor for gradient in gradients]
        if self.flags.gradient_noise:
            noises = tf.numpy_function(self._noises, [step], [tf.float32] * len(self.weights), stateful=False)
            gradients = [
                gradient + tf.ensure_shape(noise, gradient.shape)
                for gradient, noise in zip(gradients, noises, strict=True)
            ]
        return list(gradients)

    def _noises(self, step: np.ndarray) -> list[np.ndarray]:
        flags = {"eta": self.flags.gradient_noise, "seed": self.seed, "step": int(step)}
        return [
            weight.from_canonical(gradient_noise(weight.name, weight.canonical_shape, **flags))
            for weight in self.weights
        ]
