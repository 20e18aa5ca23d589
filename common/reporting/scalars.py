"""Numbers of a run that are drawn as curves, and the names of the curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CURVES = ("step", "epoch")
"""Events with a point of each curve. The field of the same name is its position on the x-axis."""
_FIELDS = {"step": ("learning_rate", "loss"), "epoch": ("train_loss", "images_per_second")}
_METRIC = "validation_"
"""Beginning of the fields of an epoch that are metrics."""
_NO_METRIC = "validation_samples"


def scalars(event: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the points of an event by the names of their curves, such as `epoch/train_loss`."""
    return {f"{event}/{field}": value for field, value in fields.items() if _is_drawn(event, field, value)}


def _is_drawn(event: str, field: str, value: object) -> bool:
    if field in _FIELDS[event]:
        return True
    is_metric = event == "epoch" and field.startswith((_METRIC, f"ema_{_METRIC}")) and field != _NO_METRIC
    return is_metric and isinstance(value, (int, float))
