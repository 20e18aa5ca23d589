"""Read values inside graphs of TensorFlow, by an operation that calls Python with the inspected values."""

from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.commands.prove.observer.guarding import Arguments
from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.values import stride


def install(observer: Observer) -> None:
    """Keep functions of the script from being compiled from now on, since XLA cannot call Python."""

    def observe(*args: Any, jit_compile: bool | None = None, **kwargs: Any) -> Generator[Arguments, Any, None]:
        yield args, kwargs

    replace(tf, "function", observer.around("compiled functions", observe))


def native(variable: Any) -> Any:
    """Return the tf.Variable of a Keras variable, or any other value itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def some_values(tensor: Any) -> tf.Tensor:
    """Return the values of a tensor that are projected or digested, as a vector."""
    flat = tf.reshape(tf.convert_to_tensor(native(tensor)), [-1])
    return flat[:: stride(flat.shape.num_elements() or 1)]


def call_with(function: Callable[..., None], tensors: Sequence[Any]) -> None:
    """Call a function with arrays whenever the graph that is being traced runs, or at once without a graph."""

    def call(*arrays: Any) -> None:
        function(*arrays)

    tf.numpy_function(call, list(tensors), [])
