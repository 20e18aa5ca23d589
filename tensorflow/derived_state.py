"""State of layers that is no Keras variable: constants, tables and vocabularies, as `adapt` computes them.

A broadcast of variables does not reach it, so two ranks may have equal weights and compute different outputs. Trainers
and the drop-in compare it over ranks.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.tensorflow.compat import layers_of


def derive_again(model: keras.Model) -> None:
    """Compute what layers derive from their variables (Normalization's mean and variance) from the present values."""
    for layer in layers_of(model):
        if layer.variables and callable(getattr(layer, "finalize_state", None)):
            layer.finalize_state()


def constants_of(model: keras.Model) -> Iterator[tuple[keras.layers.Layer, str, str]]:
    """Yield layer, attribute and digest of the numbers, arrays, and vocabularies that layers hold beside variables."""
    for layer in layers_of(model):
        for attribute, value in _state(layer):
            yield layer, attribute, hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _state(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a layer's state beside its variables, those of a vocabulary included."""
    if isinstance(layer, keras.Model):  # its attributes are a user's, such as the samples of this rank
        return
    if _has_vocabulary(layer):
        yield "vocabulary", layer.get_vocabulary()
    # Such as a salt; where there are weights, their shapes tell. A user's may count what a rank has seen.
    whole = type(layer).__module__.startswith("keras.") and not layer.variables
    for name, value in sorted(vars(layer).items()):
        if name.startswith("_") or name in ("seed", "summary"):
            continue
        found = _numbers(value, whole=whole)
        if found is not None:
            yield name, found


def _has_vocabulary(layer: keras.layers.Layer) -> bool:
    kinds = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)
    return isinstance(layer, kinds)


def _numbers(value: Any, *, whole: bool) -> Any:
    """Return fractions, arrays, tensors and lists of them as bytes and lists; None for all else.

    Variables of Keras are left out: it knows weights, and what is none follows the samples, as states of recurrent
    layers.

    Args:
        whole: whether to return whole numbers as well.
    """
    if isinstance(value, keras.Variable):
        return None
    if isinstance(value, (float, np.floating)) or (whole and type(value) is int):
        return float(value)
    if isinstance(value, (np.ndarray, tf.Variable)) or (tf.is_tensor(value) and hasattr(value, "numpy")):
        array = value if isinstance(value, np.ndarray) else value.numpy()
        return (array.dtype.str, array.shape, array.tobytes()) if array.dtype != object else array.tolist()
    if isinstance(value, (list, tuple)):
        found = [_numbers(one, whole=whole) for one in value]
        return found if found and all(one is not None for one in found) else None
    return None
