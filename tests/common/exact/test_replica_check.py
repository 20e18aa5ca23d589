"""The replica check, on real ranks. Oracle: weights that were made to differ."""

from __future__ import annotations

import numpy as np
import pytest

from allstep.common.base.errors import Fault
from allstep.common.exact.replica_check import compare


def test_names_ranks_and_first_parameter():
    digests = np.array([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 8]])
    with pytest.raises(Fault, match=r"after step 1: the weights of rank 2, 3 differ from those of rank 0, first in b$"):
        compare(["a", "b", "c"], digests, "after step 1")


def test_equal_weights_pass():
    compare(["a", "b"], np.array([[1, 2], [1, 2]]), "after step 1")
