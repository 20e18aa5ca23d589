import numpy as np

from allstep.common.exact.replica_check import digest


def test_it_is_that_of_the_specification():
    assert digest(np.zeros(0)) == 0x2D06800538D394C2


def test_one_bit_changes_the_digest():
    weights = np.linspace(0, 1, 1000, dtype=np.float32)
    changed = weights.copy()
    changed.view(np.uint32)[777] ^= 1
    assert digest(weights) != digest(changed)
    assert digest(weights[::2]) == digest(weights[::2].copy())
