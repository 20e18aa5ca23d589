"""How values get out of the graphs of TensorFlow: by an operation that calls Python with what is looked at of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.commands.prove.observer.observer import replace
from allstep.commands.prove.observer.values import stride


def install() -> None:
    """Leave functions of the script uncompiled from now on, for XLA calls no Python."""

    def wrap(function: Any) -> Any:
        @functools.wraps(function)
        def observed(*args: Any, jit_compile: bool | None = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return observed

    replace(tf, "function", wrap)


def native(variable: Any) -> Any:
    """The tf.Variable of Keras' one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def some_values(tensor: Any) -> tf.Tensor:
    """The values of a tensor that are projected, or digested, as one row."""
    flat = tf.reshape(tf.convert_to_tensor(native(tensor)), [-1])
    return flat[:: stride(flat.shape.num_elements() or 1)]


def call_with(function: Callable[..., None], tensors: Sequence[Any]) -> None:
    """Call a function with arrays whenever what is being traced is run; at once where nothing is."""

    def call(*arrays: Any) -> None:
        function(*arrays)

    tf.numpy_function(call, list(tensors), [])
