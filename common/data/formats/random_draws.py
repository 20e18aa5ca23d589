"""Random numbers that a user's data set draws from the generators of a process: in each sample from its own seed.

So a sample depends on (seed, epoch, index) alone: it is the same on any number of ranks, and after a resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within it, the generators of Python, NumPy and PyTorch draw what follows from `numbers`; before and after it,
    they draw what they would draw without it."""
    before = states()
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


def states() -> tuple[Any, Any, Any]:
    """Return the states of the generators; their text tells whether they are the same."""
    torch = _torch()
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state() if torch else None


def draws() -> tuple[object, ...]:
    """Return what differs once a number was drawn."""
    python, numpy, torch = states()
    return python, numpy[1].tobytes(), numpy[2:], None if torch is None else torch.numpy().tobytes()


def _torch() -> Any:
    """Return PyTorch, if this process has imported it."""
    return sys.modules.get("torch")
