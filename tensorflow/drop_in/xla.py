"""XLA around Horovod, whose operations it cannot compile.

A training step becomes three parts: an XLA program that computes gradients, Horovod, which reduces them, and an XLA
program that applies them. `train_step` is compiled unchanged, with an `apply` that only hands out the gradients.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from allstep.common.process.environment import within

HandedOut = list[tuple[keras.optimizers.Optimizer, list[Any], list[Any]]]
"""Optimizers that were to apply gradients, with these gradients and their variables, in the same order."""

_HANDED_OUT: ContextVar[HandedOut | None] = ContextVar("handed_out", default=None)
_COMPILES_UPDATES: ContextVar[bool] = ContextVar("compiles_updates", default=False)

OUTSIDE = (
    "expected Horovod's operations outside of what XLA compiles; received an optimizer's `apply` inside. Have XLA "
    "compile what computes the gradients, by tf.function(jit_compile=True), and apply them outside of it; compile a "
    "model with a `train_step` of your own with jit_compile=False."
)


def compiled_step(train_step: Callable[[Any], dict[str, Any]], data: Any) -> dict[str, Any]:
    """Run Keras' `train_step` on `data`, with the gradients and the update as two XLA programs.

    Call it while a step is traced, outside of code that XLA compiles. Returns: the metrics.
    """
    handed_out: HandedOut = []

    def compute(data: Any) -> tuple[dict, list[list[Any]]]:
        handed_out.clear()  # TensorFlow traces a function that creates variables twice
        with within(_HANDED_OUT, handed_out):
            metrics = train_step(data)
        return metrics, [gradients for _, gradients, _ in handed_out]

    metrics, computed = tf.function(compute, jit_compile=True, autograph=False)(data)
    with compiled_updates():
        for (optimizer, _, variables), gradients in zip(handed_out, computed, strict=True):
            optimizer.apply(gradients, variables)
    return metrics


def compiled_updates() -> contextlib.AbstractContextManager[None]:
    """Let XLA compile the updates of distributed optimizers with reduced gradients in the block."""
    return within(_COMPILES_UPDATES, True)


def hand_out(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
    """Return whether `compiled_step` has asked for the gradients of `optimizer`; if so, hand them out."""
    handed_out = _HANDED_OUT.get()
    if handed_out is None:
        return False
    handed_out.append((optimizer, list(gradients), list(variables)))
    return True


def updated(update: Callable[[Sequence[Any]], None], gradients: Sequence[Any]) -> None:
    """Call `update` with reduced gradients, compiled by XLA within `compiled_updates`."""
    if _COMPILES_UPDATES.get():
        update = tf.function(update, jit_compile=True, autograph=False)
    update(gradients)
