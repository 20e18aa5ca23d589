"""State of layers that is not in Keras variables: constants, tables and vocabularies, as `adapt` computes them.

A broadcast of variables does not include it, so two ranks may have equal weights and compute different outputs. The
trainers and the drop-in compare it over ranks.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.tensorflow.compat import layers_of

_WITH_VOCABULARY = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)


def derive_again(model: keras.Model) -> None:
    """Recompute what layers derive from their variables, such as Normalization's mean and variance."""
    for layer in layers_of(model):
        if layer.variables and callable(getattr(layer, "finalize_state", None)):
            layer.finalize_state()


def constants_of(model: keras.Model) -> Iterator[tuple[keras.layers.Layer, str, str]]:
    """Yield layer, attribute and digest of all numbers, arrays and vocabularies of layers that are not variables."""
    for layer in layers_of(model):
        if layer is model:  # whose attributes may be the samples of this rank
            continue
        for attribute, value in _state(layer):
            yield layer, attribute, hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _state(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a layer's state besides its variables, including its vocabulary."""
    if isinstance(layer, _WITH_VOCABULARY):
        yield "vocabulary", layer.get_vocabulary()
    # Whole numbers such as a salt; weights would show them by their shapes. A user's may count this rank's samples.
    whole = type(layer).__module__.startswith("keras.") and not layer.variables
    for name, value in sorted(vars(layer).items()):
        if name.startswith("_") or name in ("seed", "summary"):
            continue
        found = _numbers(value, whole=whole)
        if found is not None:
            yield name, found


def _numbers(value: Any, *, whole: bool) -> Any:
    """Return floats, arrays, tensors and lists of them as bytes and lists; None for anything else.

    Variables of Keras are left out: weights are compared elsewhere, and others depend on the samples, such as the
    states of recurrent layers. `whole` tells whether to return whole numbers as well.
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
