"""Horovod in PyTorch, called as its optimizer calls it: by name, and in place where there is such a call."""

from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import torch

from allstep.commands.collectives.backends import Operation, returning
from allstep.common.base.resources import keep_freed_memory


class HorovodTorch:
    """Collectives of Horovod's global process set."""

    def __init__(self) -> None:
        keep_freed_memory()  # as in the trainer, which would otherwise allocate results in every step
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def all_reduce(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: hvd.allreduce_(buffer, op=hvd.Sum, name="all_reduce"), buffer.numpy)

    def broadcast(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: hvd.broadcast_(buffer, 0, name="broadcast"), buffer.numpy)

    def all_gather(self, array: np.ndarray) -> Operation:
        return _returning(array, lambda buffer: hvd.allgather(buffer, name="all_gather"))

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        return _returning(array, lambda buffer: hvd.reducescatter(buffer, op=hvd.Sum, name="reduce_scatter"))

    def all_to_all(self, array: np.ndarray) -> Operation:
        return _returning(array, lambda buffer: hvd.alltoall(buffer, name="all_to_all"))


def _returning(array: np.ndarray, call: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    """Return the operation of a call that returns a new tensor."""
    buffer = torch.from_numpy(array.copy())
    return returning(lambda: call(buffer))
