"""States of generators of random numbers, of Python, NumPy and PyTorch."""

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def state_of(generator: Any) -> str | None:
    """Return the state of a generator in words; None for anything else."""
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if (torch := _torch()) and isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    return repr(generator.get_state()) if isinstance(generator, np.random.RandomState) else None


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within it, the generators of Python, NumPy and PyTorch draw what follows from `numbers`; before and after it,
    they draw what they would draw without it."""
    before = _states()
    seed = int.from_bytes(hashlib.sha256(f"sample {numbers}".encode()).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    if torch := _torch():
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if torch:
            torch.default_generator.set_state(before[2])


def draws() -> tuple[object, ...]:
    """Return what differs once a number was drawn."""
    python, numpy, torch = _states()
    return python, numpy[1].tobytes(), numpy[2:], None if torch is None else torch.numpy().tobytes()


def _states() -> tuple[Any, Any, Any]:
    torch = _torch()
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state() if torch else None


def _torch() -> Any:
    """Return PyTorch, if this process has imported it."""
    return sys.modules.get("torch")
