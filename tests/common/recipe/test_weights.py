"""Canonical weights: the same initial values in both frameworks, and one checksum for equal weights."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from allstep.common.recipe.weights import checksum, initial_weights

SHAPES = {"conv1.weight": (32, 3, 3, 3), "conv1.bias": (32,), "fc1.weight": (128, 288), "fc1.bias": (128,)}


def test_initial_weights_depend_on_seed_and_name_alone():
    weights = initial_weights(SHAPES, seed=1)
    alone = initial_weights({"fc1.weight": SHAPES["fc1.weight"]}, seed=1)
    assert np.array_equal(weights["fc1.weight"], alone["fc1.weight"])
    assert not np.array_equal(weights["fc1.weight"], initial_weights(SHAPES, seed=2)["fc1.weight"])
    other = initial_weights({"fc2.weight": SHAPES["fc1.weight"]}, seed=1)
    assert not np.array_equal(weights["fc1.weight"], other["fc2.weight"])


def test_initial_weights_stay_the_same_in_every_version():
    """Initial weights match a recorded digest, so that curves of different versions can be compared."""
    weights = initial_weights({"fc1.weight": (2, 3)}, seed=0)["fc1.weight"]
    assert hashlib.sha256(weights.tobytes()).hexdigest()[:16] == "38fc4dbbd24fb034"


@pytest.mark.parametrize("name", ["conv1.weight", "fc1.weight"])
def test_initial_weights_have_the_variance_of_he(name):
    """Oracle: variance 2 / fan_in of He et al. 2015, equation 10; five standard errors of a uniform's variance."""
    weights = initial_weights(SHAPES, seed=0)[name]
    fan_in = math.prod(SHAPES[name][1:])
    assert weights.dtype == np.float32 and np.abs(weights).max() <= math.sqrt(6 / fan_in)
    assert np.var(weights) == pytest.approx(2 / fan_in, rel=5 * math.sqrt(0.8 / weights.size))
    assert not initial_weights(SHAPES, seed=0)["fc1.bias"].any()


def test_checksum_is_that_of_names_types_shapes_and_values():
    weights = initial_weights(SHAPES, seed=0)
    expected = checksum(weights)
    assert checksum(dict(reversed(weights.items()))) == expected  # in any order
    fortran = {name: np.asfortranarray(array) for name, array in weights.items()}
    assert checksum(fortran) == expected  # in any memory layout
    one_bit = {name: array.copy() for name, array in weights.items()}
    one_bit["fc1.bias"].view(np.uint32)[7] ^= 1
    renamed = {name.replace("fc1", "fc9"): array for name, array in weights.items()}
    reshaped = {name: array.reshape(1, *array.shape) for name, array in weights.items()}
    doubled = {name: array.astype(np.float64) for name, array in weights.items()}
    assert len({expected, *map(checksum, (one_bit, renamed, reshaped, doubled))}) == 5
