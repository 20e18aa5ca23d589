"""Flags of the trainers that are wrong in themselves. Oracle: the contract of mistakes, in `mistake.check`."""

from __future__ import annotations

import pytest
from mistake import PYTORCH, TENSORFLOW, Mistake, check

MISTAKES = {
    "epochs 0": Mistake(f"{PYTORCH} --epochs 0", "--epochs to be at least 1", "0"),
    "epochs 0, TensorFlow": Mistake(f"{TENSORFLOW} --epochs 0", "--epochs to be at least 1", "0"),
    "unknown strategy": Mistake(f"{PYTORCH} --strategy hogwild", "--strategy to be one of", "hogwild"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags(name, tmp_path):
    check(MISTAKES[name], tmp_path)
