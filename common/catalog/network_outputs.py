"""Outputs of networks of users and libraries: the logits among them, and the shape that a data set needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from allstep.common.base.errors import UserError, warn
from allstep.common.launch.placement import apparent_rank

if TYPE_CHECKING:
    from allstep.common.data.datasets import Dataset


def logits_of(outputs: Any, shape: tuple[int, ...]) -> Any:
    """Return the logits among a network's outputs: those of that name, or the only tensor of shape (n, *shape).

    Outputs without recognisable logits are returned unchanged, and so is a single tensor, but (n,) becomes (n, 1) if
    `shape` is (1,).
    """
    if hasattr(outputs, "shape"):
        return outputs[:, None] if shape == (1,) and len(outputs.shape) == 1 else outputs
    is_mapping = isinstance(outputs, Mapping)
    named = outputs.get("logits") if is_mapping else getattr(outputs, "logits", None)
    if hasattr(named, "shape"):
        return named
    values = outputs.values() if is_mapping else outputs if isinstance(outputs, (tuple, list)) else ()
    fitting = [one for one in values if hasattr(one, "shape") and tuple(one.shape[1:]) == shape]
    return fitting[0] if len(fitting) == 1 else outputs


def check_outputs(model: str, received: Any, dataset: Dataset) -> None:
    """Refuse a network whose outputs for two samples, `received`, are not an array, or have the wrong shape or type.

    A network may know more tokens or classes than the data set, unless flags say something of each class.
    """
    shape = tuple(received.shape) if hasattr(received, "shape") else None
    expected = (2, *dataset.output_shape)
    may_have_more = dataset.task != "regression" and not (dataset.class_weights or dataset.mixes_targets)
    if may_have_more and shape and shape[:-1] == expected[:-1] and shape[-1] > expected[-1]:
        expected = shape
        if dataset.task == "classification" and apparent_rank() == 0:
            warn(f"--model {model} has {shape[-1]} outputs for {dataset.num_classes} classes, which count from 0")
    if shape != expected:
        outputs, advice = type(received).__name__, "return one tensor of logits"
        if shape is not None:
            needed = "as many"
            if dataset.task == "classification":
                needed = "one output for each class, which count from 0"
                needed += ", or --task regression for a loss of numbers" * (shape[1:] == (1,))
            advice = f"give its last layer {needed}"
            if math.prod(shape) == math.prod(expected):
                advice = "flatten them, in the order of the targets' numbers"
            outputs = _of_samples(shape)
        raise UserError(f"expected outputs {_of_samples(expected)} of --model {model}, received {outputs}; {advice}")
    if "float" not in str(received.dtype):
        raise UserError(
            f"expected floating-point numbers as outputs of --model {model}, received {received.dtype}; return logits"
        )


def no_gradient() -> UserError:
    """Return the error for a network whose weights do not change the loss, as after argmax or detach."""
    return UserError(
        "expected outputs that change with the network's weights, received outputs without a gradient; leave out what "
        "ends it, such as argmax, a comparison, detach and no_grad"
    )


def _of_samples(shape: tuple[int, ...]) -> str:
    return f"(n, {', '.join(map(str, shape[1:]))})" if len(shape) > 1 and shape[0] == 2 else f"of shape {shape}"
