"""The data set, model and optimizer that a user's program gives to a run in place of those that flags name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # trainers answer --help without NumPy
    from allstep.common.data.datasets import Dataset


@dataclasses.dataclass(frozen=True)
class Parts:
    """Each is None where a flag names it."""

    dataset: Dataset | None = None
    model: Any = None
    """A network, or a function of the shape of a sample and the number of classes that builds one."""
    optimizer: Any = None


NOTHING = Parts()
"""All is as flags name it."""
