"""XLA around Horovod, whose operations it cannot compile.

A training step becomes three parts: a program of XLA's that computes gradients, Horovod, which reduces them, and a
program of XLA's that applies them. Keras' own `train_step` ends with the optimizer's `apply`, but for metrics, which
look at no weight; so it is compiled as it is, with an `apply` that only hands the gradients out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

HandedOut = list[tuple[keras.optimizers.Optimizer, list[Any], list[Any]]]
"""Of each optimizer that was to apply gradients: those, and their variables in the same order."""

_HANDED_OUT: ContextVar[HandedOut | None] = ContextVar("handed_out", default=None)
_COMPILES_UPDATES: ContextVar[bool] = ContextVar("compiles_updates", default=False)

OUTSIDE = (
    "expected Horovod's operations outside of what XLA compiles; received an optimizer's `apply` inside. Have XLA "
    "compile what computes the gradients, by tf.function(jit_compile=True), and apply them outside of it; compile a "
    "model with a `train_step` of your own with jit_compile=False."
)


def compiled_step(train_step: Callable[[Any], dict], data: Any) -> dict:
    """What Keras' own `train_step` does with `data`, with gradients and update as programs of XLA's.

    It is called while a step is traced, outside of what XLA compiles. Returns: the metrics.
    """
    handed_out: HandedOut = []

    def compute(data: Any) -> tuple[dict, list[list[Any]]]:
        handed_out.clear()  # TensorFlow traces twice what makes variables
        with _set(_HANDED_OUT, handed_out):
            metrics = train_step(data)
        return metrics, [gradients for _, gradients, _ in handed_out]

    metrics, computed = tf.function(compute, jit_compile=True, autograph=False)(data)
    with compiled_updates():
        for (optimizer, _, variables), gradients in zip(handed_out, computed, strict=True):
            optimizer.apply(gradients, variables)
    return metrics


@contextlib.contextmanager
def compiled_updates() -> Iterator[None]:
    """Within it, a distributed optimizer has XLA compile what it does with reduced gradients."""
    with _set(_COMPILES_UPDATES, True):
        yield


def hand_out(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Hand out what `optimizer` is to apply, where that is asked for; False where it is to apply it here."""
    handed_out = _HANDED_OUT.get()
    if handed_out is None:
        return False
    handed_out.append((optimizer, list(gradients), list(variables)))
    return True


def updated(update: Callable[[Sequence[Any]], None], gradients: Sequence[Any]) -> None:
    """Call `update` with reduced gradients, by XLA where that is asked for."""
    if _COMPILES_UPDATES.get():
        update = tf.function(update, jit_compile=True, autograph=False)
    update(gradients)


@contextlib.contextmanager
def _set(variable: ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
