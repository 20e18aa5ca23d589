"""The numbers of a run that are drawn as curves, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CURVES = ("step", "epoch")
"""The events that have a point of each curve, which is also the field with its number."""
_FIELDS = {
    "step": ("learning_rate", "loss"),
    "epoch": ("train_loss", "validation_loss", "validation_accuracy", "validation_mae", "images_per_second"),
}


def scalars(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The points of an event by the names of their curves, as `epoch/train_loss`."""
    return {f"{event}/{field}": fields[field] for field in _FIELDS[event] if field in fields}
