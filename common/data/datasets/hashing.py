"""Random numbers as a pure function of a counter: a sample needs only its index, no generator state."""

import numpy as np


def hash64(counters: np.ndarray) -> np.ndarray:
    """Map uint64 counters of any shape one-to-one to uint64 values that look independent and uniform.

    This is the output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), evaluated at the counter instead of at a running state.
    """
    x = counters * np.uint64(0x9E3779B97F4A7C15)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return x


def uniform_draws(indices: np.ndarray, num_draws: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return uniform numbers in [0, 1), float64 (n, num_draws), that depend only on (seed, epoch, index, draw)."""
    key = hash64(np.array([seed % 2**64], dtype=np.uint64))
    key = hash64(key + np.uint64(epoch))
    keys = hash64(key + np.asarray(indices).astype(np.uint64))
    bits = hash64(keys[:, None] + np.arange(num_draws, dtype=np.uint64))
    # The upper 53 bits: as many as a float64 holds exactly.
    return (bits >> np.uint64(11)) * 2.0**-53
