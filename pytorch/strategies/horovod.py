"""Horovod: one process a GPU or core, gradients averaged by all-reduce as backward produces them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import horovod
import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.elastic import notification_manager

from allstep.common.base.collectives import as_bytes
from allstep.common.config.train_config import StrategyConfig
from allstep.common.training.horovod_ranks import HorovodRanks
from allstep.pytorch.compat import all_reduce_handles, set_averaged_parameters, without_compiler
from allstep.pytorch.kept.network_state import as_real, can_train
from allstep.pytorch.strategies.ordered_sum import Wait
from allstep.pytorch.strategies.reduction import Reduction, all_trainable, trainable
from allstep.pytorch.strategies.strategy import Strategy


def ask_for_missing(parameters: Sequence[torch.nn.Parameter]) -> Callable[[], list[torch.nn.Parameter]]:
    """Begin to compare which gradients are there; all ranks call it, and then what it returns.

    Returns: a function that waits, and returns the parameters that have no gradient on all ranks.
    """
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    handle = hvd.allreduce_async_(counts, op=hvd.Sum, name="allstep.have_gradients")

    def missing() -> list[torch.nn.Parameter]:
        hvd.synchronize(handle)
        return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]

    return missing


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
    """Exchanges the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool
    """See `ordered_sum.Exchange`."""

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
        sums = _Bf16Sums if self.flags.compression == "bf16" else _AllReduces
        kind = _AdasumOfUpdates if self.flags.op == "adasum" else sums
        return kind(self.compiled(network), optimizer, self.flags)

    def _broadcast_bytes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        _broadcast(tensors, 0)

    def sum_over_ranks(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        hvd.allreduce_(tensor, op=hvd.Sum, name=f"allstep.{name}")
        return tensor


@dataclass(frozen=True)
class Sendable:
    """One of Horovod's compressions, for gradients in any order in memory and for complex ones, which it refuses."""

    compression: Any

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, torch.Tensor]]:
        """Return what is sent, and what `decompress` needs."""
        sent, context = self.compression.compress(as_real(tensor).contiguous())
        return sent, (context, tensor)

    def decompress(self, tensor: torch.Tensor, context: tuple[Any, torch.Tensor]) -> torch.Tensor:
        """Return what was received as the gradient was."""
        context, like = context
        tensor = self.compression.decompress(tensor, context)
        if like.is_complex():
            tensor = torch.view_as_complex(tensor)
        # Optimizers need gradients that lie in memory as their weights do.
        return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def _broadcast(tensors: Mapping[str, torch.Tensor], root: int) -> None:
    """Receive tensors from rank `root`, in their place."""
    for handle in [hvd.broadcast_async_(one, root, name=f"allstep.{name}") for name, one in tensors.items()]:
        hvd.synchronize(handle)


class _AllReduces(Reduction):
    """Horovod's DistributedOptimizer, whose hooks all-reduce gradients. The optimizer itself is called by the step.

    So any optimizer will do, whether or not Horovod can make another one like it from its parameter groups.
    """

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        super().__init__(network, optimizer)
        self._parameters = [parameter for parameter in network.parameters() if can_train(parameter)]
        with all_trainable(self._parameters):  # so that frozen ones get hooks
            self._averaging = hvd.DistributedOptimizer(
                without_compiler(torch.optim.SGD)(self._parameters, lr=0.0),
                named_parameters=network.named_parameters(),
                compression=cast("Any", Sendable(getattr(hvd.Compression, flags.compression))),
                op={"average": hvd.Average, "sum": hvd.Sum}[flags.op],
                backward_passes_per_step=flags.accumulate_steps,
                sparse_as_dense=True,
            )

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        # Horovod sends zeros for a gradient that is missing. Whether all ranks lack it goes with the gradients.
        missing_on_all = ask_for_missing(trained)
        set_averaged_parameters(self._averaging, trained)
        self._averaging.synchronize()
        for parameter in missing_on_all():
            parameter.grad = None
        return loss_sum

    def pending_tensors(self) -> Sequence[str]:
        return _pending(self._averaging)


class _AdasumOfUpdates(Reduction):
    """Adasum, which combines what the optimizer makes of each rank's own gradients: Horovod steps the optimizer."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        distributed = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=network.named_parameters(),
            compression=cast("Any", Sendable(getattr(hvd.Compression, flags.compression))),
            op=hvd.Adasum,
            backward_passes_per_step=flags.accumulate_steps,
            sparse_as_dense=True,
        )
        super().__init__(network, distributed)

    def pending_tensors(self) -> Sequence[str]:
        return _pending(self.optimizer)


def _pending(optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name, handle in all_reduce_handles(optimizer).items() if _is_under_way(handle)]


def _is_under_way(handle: int) -> bool:
    try:
        return not hvd.poll(handle)
    except ValueError:  # it has been waited for, and Horovod has forgotten it
        return False


def bf16_sum(vector: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the float32 sum of the ranks' vectors (n,), divided by `divisor`; all ranks call it.

    It travels as bfloat16, which Horovod's own messages do not have (0.28.1). Each rank adds up a part of the vectors
    in float32, so that a sum is rounded once, and not at each rank as in a ring of bfloat16. As many bytes travel as in
    an all-reduce of 16 bits.
    """
    size, world_size = len(vector), hvd.size()
    padded = torch.nn.functional.pad(vector.bfloat16(), (0, -size % world_size))
    handle = hvd.alltoall_async(padded.view(torch.uint8), name="allstep.bf16_parts")
    parts = cast("tuple[torch.Tensor, torch.Tensor]", hvd.synchronize(handle))[0]
    own = parts.view(torch.bfloat16).view(world_size, -1).float().sum(0) / divisor
    whole = hvd.allgather(own.bfloat16().view(torch.uint8), name="allstep.bf16_sums")
    return whole.view(torch.bfloat16)[:size].float()


class _Bf16Sums(Reduction):
    """--compression bf16: all gradients together, after the backward pass."""

    def __init__(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, flags: StrategyConfig) -> None:
        super().__init__(network, optimizer)
        self._divides = flags.op == "average"

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        weights = trainable(self.model)
        missing_on_all = ask_for_missing(weights)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        dense = [one.to_dense() if one.is_sparse else one for one in gradients]
        summed = bf16_sum(torch.cat([one.flatten() for one in dense]), hvd.size() if self._divides else 1.0)
        for weight, part in zip(weights, summed.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight)
        for weight in missing_on_all():
            weight.grad = None
        return loss_sum

    def pending_tensors(self) -> tuple[str, ...]:
        return ("the sum of all gradients in bfloat16",)
