"""Horovod: one process a GPU or core, gradients averaged by all-reduce as backward produces them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import horovod
import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.elastic import notification_manager

from allstep.common.cli.strategy_flags import SUM_OF_SLICES, check_horovod, configure_horovod
from allstep.common.launch.devices import check_agreement
from allstep.common.launch.horovod_build import usable_gpus
from allstep.common.training.elastic import form_anew
from allstep.pytorch.compat import all_reduce_handles
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm
from allstep.pytorch.strategies.ordered_sum import Exchange, Wait
from allstep.pytorch.strategies.strategy import CompiledTrainStep, Strategy, TrainStep


class Horovod(Strategy):
    """The five steps in Horovod."""

    def init(self) -> None:
        self.choose_device()
        configure_horovod(self.placement, self.flags, on_gpu=self.gpu is not None)
        if self.flags.elastic:
            self.placement = form_anew(hvd, notification_manager, self.placement)
        else:
            hvd.init()
        check_horovod(self.placement, self.flags.op, size=hvd.size(), mpi_enabled=hvd.mpi_enabled())
        self.collectives = HorovodCollectives(hvd.rank(), hvd.size())

    def count_gpus(self) -> int:
        return usable_gpus(super().count_gpus(), self._wanted_device, self.placement)

    def pin_device(self) -> torch.device:
        device = super().pin_device()
        check_agreement(
            int(self.collectives.all_gather(np.array([self.gpu is not None], np.int64)).sum()), self.placement
        )
        return device

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(network, sum_over_ranks)
        self.compiled(network)
        if self.flags.slices:
            return network, optimizer
        self._optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=network.named_parameters(),
            compression=getattr(hvd.Compression, self.flags.compression),
            op={"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[self.flags.op],
            backward_passes_per_step=self.flags.accumulate_steps,
        )
        return network, self._optimizer

    def compile_train_step(self, step: TrainStep) -> CompiledTrainStep:
        """The last pass waits for the averages, since they may be changed before the optimizer takes them."""
        if self.flags.slices:  # `SlicedStep` has them meet
            return super().compile_train_step(step)
        if self.flags.op == "adasum":  # it adds up what the optimizer makes of each rank's own gradients
            return super().compile_train_step(step)
        self._steps_without_waiting = contextlib.ExitStack()  # kept, for the context ends with it
        self._steps_without_waiting.enter_context(self._optimizer.skip_synchronize())

        def compiled(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            loss_sum = step(inputs, targets, loss_weight)
            if is_last:
                self._optimizer.synchronize()
            return loss_sum

        return compiled

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # The optimizer remembers nothing yet; what a resumed one does is sent with its checkpoint.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def _exchange(self) -> Exchange | None:
        return HorovodExchange(keeps_order=self.gpu is None) if hvd.size() > 1 else None

    def pending_tensors(self) -> Sequence[str]:
        if self.flags.slices:
            return (SUM_OF_SLICES,)
        return [name for name, handle in all_reduce_handles(self._optimizer).items() if _is_under_way(handle)]

    def versions(self) -> dict[str, str]:
        return {"horovod": horovod.__version__}


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
        handles = {
            name: hvd.broadcast_async(torch.from_numpy(np.array(array)), root, name=f"allstep.{name}")
            for name, array in arrays.items()
        }
        return {name: cast("torch.Tensor", hvd.synchronize(handle)).numpy() for name, handle in handles.items()}

    def barrier(self) -> None:
        hvd.barrier()


@dataclass(frozen=True)
class HorovodExchange:
    """Of the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool
    """MPI and Gloo choose a way by size; NCCL may measure first."""

    def all_to_all(self, sent: torch.Tensor, received_sizes: list[int], number: int) -> Wait:
        handle = hvd.alltoall_async(sent, name=f"allstep.slices.{number}")
        return lambda: cast("tuple[torch.Tensor, torch.Tensor]", hvd.synchronize(handle))[0]

    def all_gather(self, part: torch.Tensor, number: int) -> Wait:
        handle = hvd.allgather_async(part, name=f"allstep.sum_of_slices.{number}")
        return lambda: cast("torch.Tensor", hvd.synchronize(handle))

    def all_reduce(self, vector: torch.Tensor, number: int) -> Wait:
        handle = hvd.allreduce_async_(vector, op=hvd.Sum, name=f"allstep.slices.{number}")
        return lambda: cast("torch.Tensor", hvd.synchronize(handle))


def sum_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sum `tensor` over all ranks, in place."""
    hvd.allreduce_(tensor, op=hvd.Sum, name=f"allstep.{name}")
    return tensor


def _is_under_way(handle: int) -> bool:
    try:
        return not hvd.poll(handle)
    except ValueError:  # it has been waited for, and Horovod has forgotten it
        return False
