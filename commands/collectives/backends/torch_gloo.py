"""torch.distributed between CPUs, with Gloo."""

import numpy as np
import torch
import torch.distributed as dist

from allstep.commands.collectives.backends import Operation
from allstep.common.base.resources import keep_freed_memory
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.pytorch import compat
from allstep.pytorch.strategies.ddp import DDP


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
