"""Horovod: one process a GPU or core, gradients averaged by all-reduce as backward produces them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import horovod
import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.elastic import notification_manager

from allstep.common.base.collectives import as_bytes
from allstep.common.training.strategy import HorovodRanks
from allstep.pytorch.strategies.horovod_reduction import AdasumOfUpdates, Bf16Sums, Sums
from allstep.pytorch.strategies.ordered_sum import Wait
from allstep.pytorch.strategies.reduction import Reduction
from allstep.pytorch.strategies.strategy import Strategy


@dataclass(frozen=True)
class HorovodCollectives:
    """Collectives of Horovod's global process set."""

    rank: int
    world_size: int

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return hvd.allreduce(torch.from_numpy(values), op=hvd.Sum, name="allstep.sum").numpy()

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return hvd.allgather(torch.from_numpy(values)[None], name="allstep.gather").numpy()

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        received = {name: np.array(array, order="C") for name, array in arrays.items()}
        _broadcast({name: torch.from_numpy(as_bytes(array)) for name, array in received.items()}, root)
        return received

    def barrier(self) -> None:
        hvd.barrier()


@dataclass(frozen=True)
class HorovodExchange:
    """Exchange of the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool

    def all_to_all(self, sent: torch.Tensor, received_sizes: list[int], number: int) -> Wait:
        handle = hvd.alltoall_async(sent, name=f"allstep.slices.{number}")
        return lambda: cast("tuple[torch.Tensor, torch.Tensor]", hvd.synchronize(handle))[0]

    def all_gather(self, part: torch.Tensor, number: int) -> Wait:
        handle = hvd.allgather_async(part, name=f"allstep.sum_of_slices.{number}")
        return lambda: cast("torch.Tensor", hvd.synchronize(handle))

    def all_reduce(self, vector: torch.Tensor, number: int) -> Wait:
        handle = hvd.allreduce_async_(vector, op=hvd.Sum, name=f"allstep.slices.{number}")
        return lambda: cast("torch.Tensor", hvd.synchronize(handle))


class Horovod(HorovodRanks, Strategy):
    """The five steps in Horovod."""

    hvd, notifications, version = hvd, notification_manager, horovod.__version__
    collectives_of, exchange_of = HorovodCollectives, HorovodExchange

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        if self.placement.world_size == 1:  # a single rank sends nothing
            return super().reduce(network, optimizer)
        sums = Bf16Sums if self.flags.compression == "bf16" else Sums
        kind = AdasumOfUpdates if self.flags.op == "adasum" else sums
        return kind(self.compiled(network), optimizer, self.flags)

    def _broadcast_bytes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        _broadcast(tensors, 0)

    def sum_over_ranks(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"allstep.{name}")
        return tensor


def _broadcast(tensors: Mapping[str, torch.Tensor], root: int) -> None:
    """Receive tensors from rank `root`, in their place."""
    for handle in [hvd.broadcast_async_(one, root, name=f"allstep.{name}") for name, one in tensors.items()]:
        hvd.synchronize(handle)
