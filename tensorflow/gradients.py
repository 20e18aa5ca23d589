"""Changes of the averaged gradients before the optimizer's step: clipping, then noise. `pytorch/` has both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from allstep.common.recipe.weights import gradient_noise
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.passes import Gradients, on_present

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class Clip:
    """--clip-norm: scale all gradients down together so that their norm is at most this."""

    largest: float

    def __call__(self, gradients: Gradients, num_steps: tf.Tensor) -> Gradients:
        def clipped(present: list[tf.Tensor]) -> list[tf.Tensor]:
            factor = tf.minimum(1.0, self.largest / (tf.linalg.global_norm(present) + _TINY))
            return [gradient * factor for gradient in present]

        return on_present(clipped, gradients)


@dataclass(frozen=True)
class Noise:
    """--gradient-noise: add noise of variance `eta` / (1 + step)^0.55, a function of seed, step and weight."""

    eta: float
    weights: Sequence[CanonicalWeight]
    """Weights that have gradients, in the model's order."""
    seed: int

    def __call__(self, gradients: Gradients, num_steps: tf.Tensor) -> Gradients:
        noises = tf.numpy_function(self._noises, [num_steps], [tf.float32] * len(self.weights), stateful=False)
        return [
            None if gradient is None else gradient + tf.ensure_shape(noise, gradient.shape)
            for gradient, noise in zip(gradients, noises, strict=True)
        ]

    def _noises(self, step: np.ndarray) -> list[np.ndarray]:
        flags = {"eta": self.eta, "seed": self.seed, "step": int(step)}
        return [
            weight.from_canonical(gradient_noise(weight.name, weight.canonical_shape, **flags))
            for weight in self.weights
        ]
