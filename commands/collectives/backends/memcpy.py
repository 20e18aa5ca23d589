"""Lower bound of all times: every rank copies its buffer, and nothing is sent."""

from __future__ import annotations

import numpy as np

from allstep.commands.collectives.backends import Operation
from allstep.common.launch.placement import find_placement


class Memcpy:
    """A copy of the buffer on every rank, at the same time on all of them."""

    def __init__(self) -> None:
        placement = find_placement()
        self.rank, self.size = placement.rank, placement.world_size

    def copy(self, array: np.ndarray) -> Operation:
        received = np.empty_like(array)
        return Operation(lambda: np.copyto(received, array), lambda: received)
