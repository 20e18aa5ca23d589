"""Base class of strategies: how ranks are formed and how gradients are combined; and that of one process.

TensorFlow's has the same methods.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.base.resources import keep_freed_memory
from allstep.common.launch.placement import threads_per_rank
from allstep.common.training.strategy import BaseStrategy
from allstep.pytorch.compat import set_max_programs
from allstep.pytorch.kept import network_state
from allstep.pytorch.kept.network_state import as_array, as_tensor
from allstep.pytorch.passes import EvalPass, Scored
from allstep.pytorch.recompute import recompute_blocks
from allstep.pytorch.strategies.batch_norm import GlobalBatchNorm, brought_sync_batch_norm, synchronise_batch_norm
from allstep.pytorch.strategies.ordered_sum import OrderedSum
from allstep.pytorch.strategies.reduction import BUCKET, FIRST_BUCKET, Ordered, Reduction

# Compiled programs per kind of layer: one for each size of a batch or of a part of it. Beyond the limit, PyTorch warns
# and runs the layer uncompiled.
_MAX_PROGRAMS = 64


class Strategy(BaseStrategy):
    """Base class of PyTorch's strategies, with what the worker asks of them."""

    reduction: Reduction
    cuts_network = False
    """Whether each rank of the default process group has other parameters than the others."""
    ordered_sum_of = OrderedSum
    synchronise_batch_norm = staticmethod(synchronise_batch_norm)

    def pin_device(self) -> torch.device:
        torch.set_num_threads(threads_per_rank(self.placement, slices=self.flags.slices))
        keep_freed_memory()
        self.device = torch.device("cpu")
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
            self.device = torch.device("cuda", self.gpu)
        return self.device

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Give every rank the weights and buffers of rank 0. The optimizer has no state yet."""
        self._broadcast_bytes(network_state.as_bytes(self.reduction.eval_model))

    def _broadcast_bytes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have each rank receive tensors of bytes from rank 0."""

    def count_gpus(self) -> int:
        # PyTorch also counts GPUs whose driver is too old for it.
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def scope(self) -> contextlib.AbstractContextManager:
        return self.device

    def wrap(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self.flags.slices and (name := brought_sync_batch_norm(model)):
            raise UserError(
                f"expected a network without SyncBatchNorm for --slices, received {name or 'one'}; use nn.BatchNorm2d, "
                "or leave --slices out"
            )
        return super().wrap(model, optimizer)

    def compiled(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return `module`, with its forward compiled under --compile, and its blocks recomputed under --recompute.

        It is compiled inside the wrapper that averages gradients, as PyTorch's guides recommend, and inside the
        module's hooks: with the hooks of FSDP, `module.compile()` silently compiles nothing. Each batch size is
        compiled separately, which is faster than one program for all.
        """
        if self.flags.recompute:
            recompute_blocks(module)
        if self.flags.compile:
            set_max_programs(_MAX_PROGRAMS)
            for layer in module.modules():
                if isinstance(layer, GlobalBatchNorm):  # communication cannot be compiled
                    layer.forward = torch.compiler.disable(layer.forward)  # pyright: ignore[reportAttributeAccessIssue]
            module.forward = torch.compile(module.forward, dynamic=False)
        return module

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        return Reduction(self.compiled(network), optimizer)

    def reduce_in_order(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Ordered:
        return Ordered(self.compiled(network), optimizer, self.ordered_sum(), self.bucket_megabytes())

    def bucket_megabytes(self) -> Sequence[float]:
        """Return how many megabytes of slices' gradients fill a bucket: the first one, ..., and all others."""
        if self.placement.world_size == 1:
            return [math.inf]
        return [FIRST_BUCKET, BUCKET] if self.flags.bucket_size is None else [self.flags.bucket_size]

    def eval_pass(self, one_pass: EvalPass) -> Callable[[torch.Tensor, torch.Tensor], Scored]:
        """Return `one_pass` as all ranks call it."""
        return one_pass

    def overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        """Return whether `overflow` is above 0 on any rank; here all ranks have the same gradients."""
        return bool(overflow)

    # What each rank holds of the state.

    def copies(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the whole weight on each device of this process; all ranks call it."""
        return [tensor]

    def replicas(self, tensor: torch.Tensor) -> Sequence[np.ndarray]:
        """Return `copies` as arrays."""
        return [as_array(copy) for copy in self.copies(tensor)]

    def shard(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """Return the part of `array` that this rank holds, sharded like `like`."""
        return as_tensor(array, like)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """Return the whole state, of which this rank holds `tensors`; empty on ranks above 0, but for elastic jobs.

        All ranks call it.
        """
        arrays = {}
        for name, tensor in tensors.items():
            [array] = self.replicas(tensor)
            if self.placement.rank == 0 or self.flags.elastic:
                arrays[name] = array
        return arrays


def replace_parameters(
    optimizer: torch.optim.Optimizer, replacement: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Replace the parameters of an optimizer without state by those of `replacement`, and drop all others."""
    for group in optimizer.param_groups:
        group["params"] = [replacement[parameter] for parameter in group["params"] if parameter in replacement]


class Single(Strategy):
    """The five steps without other ranks."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Nothing to do: there are no other ranks."""
