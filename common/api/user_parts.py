"""Data set, model and optimizer that a user's program passes to a run instead of naming them by flags."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # trainers answer --help without NumPy
    from allstep.common.data.datasets import Dataset


@dataclasses.dataclass(frozen=True)
class Parts:
    """Objects of a user's program; each is None if a flag names it."""

    dataset: Dataset | None = None
    model: Any = None
    """Network, or a function that builds one from the shape of a sample and the number of classes."""
    optimizer: Any = None


NOTHING = Parts()
"""Parts of a run that is described only by flags."""
