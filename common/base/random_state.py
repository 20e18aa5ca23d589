"""Random numbers: states of generators of Python, NumPy and PyTorch, and functions of a counter, without a state."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def state_of(generator: Any) -> str | None:
    """Return the state of a generator as text; None for any other object."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if (torch := _torch()) and isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    return repr(generator.get_state()) if isinstance(generator, np.random.RandomState) else None


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch by `numbers` in the block, and restore their states after it."""
    seed = int.from_bytes(hashlib.sha256(f"sample {numbers}".encode()).digest()[:4], "little")
    with _put_back():
        random.seed(seed)
        np.random.seed(seed)
        if torch := _torch():
            torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def drawing_again(began: tuple[Any, Any, Any]) -> Iterator[None]:
    """Set the generators to the earlier `states()` `began` in the block, and restore their states after it."""
    with _put_back():
        _put(began)
        yield


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    before = states()
    try:
        yield
    finally:
        _put(before)


def draws() -> tuple[object, ...]:
    """Return a value that changes when any of the generators draws a number."""
    python, numpy, torch = states()
    return python, numpy[1].tobytes(), numpy[2:], None if torch is None else torch.numpy().tobytes()


def states() -> tuple[Any, Any, Any]:
    """Return the states of the generators of Python, NumPy and PyTorch."""
    torch = _torch()
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state() if torch else None


def _put(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    if torch := _torch():
        torch.default_generator.set_state(states[2])


def _torch() -> Any:
    """Return PyTorch, if this process has imported it."""
    return sys.modules.get("torch")


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
