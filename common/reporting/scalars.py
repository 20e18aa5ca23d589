"""Numbers of a run that are drawn as curves, and the names of the curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CURVES = ("step", "epoch")
"""Events with a point of each curve. The field of the same name is its position on the x-axis."""
_FIELDS = {
    "step": ("learning_rate", "loss"),
    "epoch": ("train_loss", "validation_loss", "validation_accuracy", "validation_mae", "images_per_second"),
}


def scalars(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of an event by the names of their curves, such as `epoch/train_loss`."""
    return {f"{event}/{field}": fields[field] for field in _FIELDS[event] if field in fields}
