"""Weights in a canonical form, and noise for their gradients: the same arrays in both frameworks.

The canonical names and layouts are those of PyTorch: `conv1.weight` is (out, in, height, width), `fc1.weight` is
(out, in) and, after a flatten, its inputs are ordered (channels, height, width). A batch norm has `weight`, `bias`,
`running_mean` and `running_var`.
"""

import hashlib
import math
from collections.abc import Mapping

import numpy as np

DECAY = 0.55
"""Exponent of the decay of the variance of gradient noise, gamma in the paper."""


def initial_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return initial float32 weights for canonical names and shapes; they depend only on `seed`, names and shapes.

    Weights with two or more axes are uniform in +-sqrt(6 / fan_in) (He et al. 2015, equation 10, in its uniform
    form). Scales and variances of batch norms are one; biases and means are zero.
    """
    return {name: _initial(name, shape, seed) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if len(shape) < 2:
        return np.full(shape, name.endswith((".weight", ".running_var")), np.float32)
    bound = math.sqrt(6 / math.prod(shape[1:]))
    return _generator(f"{seed} {name}").uniform(-bound, bound, shape).astype(np.float32)


def gradient_noise(name: str, shape: tuple[int, ...], *, eta: float, seed: int, step: int) -> np.ndarray:
    """Return the noise to add to the averaged gradient of the weight of that canonical name and whole shape.

    It is that of Neelakantan et al. 2015: normal, with variance eta / (1 + step)^0.55, where `step` is the number of
    steps before this one. It is computed on the host, with the same bits in both frameworks and on every rank. That
    takes 12 ns per number, or 0.3 s per step of a ResNet-50.
    """
    deviation = math.sqrt(eta / (1 + step) ** DECAY)
    return _generator(f"gradient noise {seed} {step} {name}").standard_normal(shape, np.float32) * np.float32(deviation)


def _generator(key: str) -> np.random.Generator:
    digest = hashlib.sha256(key.encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return a 64-bit seed for the random numbers of a rank in the step after `step` steps."""
    digest = hashlib.sha256(f"step {seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def checksum(weights: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 over names, types, shapes and values, which is equal for equal weights in either framework."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()
