"""Collectives between CPUs in PyTorch: those of Horovod, and those of torch.distributed with Gloo."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from allstep.commands.collectives.backends import Operation, returning
from allstep.common.base.resources import keep_freed_memory
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.pytorch import compat
from allstep.pytorch.strategies.ddp import DDP


class HorovodTorch:
    """Collectives of Horovod's global process set, called as its optimizer calls them: by name, and in place."""

    def __init__(self) -> None:
        import horovod.torch as hvd  # the other backend needs none

        keep_freed_memory()  # as in the trainer, which would otherwise allocate results in every step
        hvd.init()
        self._hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def all_reduce(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: self._hvd.allreduce_(buffer, op=self._hvd.Sum, name="all_reduce"), buffer.numpy)

    def broadcast(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: self._hvd.broadcast_(buffer, 0, name="broadcast"), buffer.numpy)

    def all_gather(self, array: np.ndarray) -> Operation:
        return _returning(array, lambda buffer: self._hvd.allgather(buffer, name="all_gather"))

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        return _returning(
            array, lambda buffer: self._hvd.reducescatter(buffer, op=self._hvd.Sum, name="reduce_scatter")
        )

    def all_to_all(self, array: np.ndarray) -> Operation:
        return _returning(array, lambda buffer: self._hvd.alltoall(buffer, name="all_to_all"))


def _returning(array: np.ndarray, call: Callable[[torch.Tensor], torch.Tensor]) -> Operation:
    """Return the operation of a call that returns a new tensor."""
    buffer = torch.from_numpy(array.copy())
    return returning(lambda: call(buffer))


class TorchGloo:
    """Collectives of torch's default process group, initialised as by the trainers' DDP strategy."""

    def __init__(self) -> None:
        keep_freed_memory()
        DDP(find_placement(), StrategyConfig()).init()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_reduce(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: dist.all_reduce(buffer), buffer.numpy)

    def broadcast(self, array: np.ndarray) -> Operation:
        buffer = torch.from_numpy(array.copy())
        return Operation(lambda: dist.broadcast(buffer, 0), buffer.numpy)

    def all_gather(self, array: np.ndarray) -> Operation:
        buffer, received = torch.from_numpy(array), torch.empty(self.size * len(array))
        return Operation(lambda: compat.all_gather(received, buffer), received.numpy)

    def reduce_scatter(self, array: np.ndarray) -> Operation:
        buffer, received = torch.from_numpy(array), torch.empty(len(array) // self.size)
        return Operation(lambda: compat.reduce_scatter(received, buffer), received.numpy)

    def all_to_all(self, array: np.ndarray) -> Operation:
        buffer, received = torch.from_numpy(array), torch.empty(len(array))
        return Operation(lambda: dist.all_to_all_single(received, buffer), received.numpy)
