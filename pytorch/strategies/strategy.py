"""What a strategy is: how the ranks are formed and how gradients meet. TensorFlow's has the same methods."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from allstep.common.base.collectives import Collectives
from allstep.common.base.memory import keep_freed_memory
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.devices import choose_gpu, report_choice
from allstep.common.launch.placement import Placement, threads_per_rank
from allstep.pytorch.compat import set_max_programs
from allstep.pytorch.passes import EvalPass
from allstep.pytorch.recompute import recompute_blocks
from allstep.pytorch.strategies.batch_norm import GlobalBatchNorm, synchronise_batch_norm
from allstep.pytorch.strategies.ordered_sum import Exchange, OrderedSum
from allstep.pytorch.strategies.reduction import BUCKET, FIRST_BUCKET, Ordered, Reduction

# Programs of one kind of layer, for the sizes of batches and of the passes into which they are cut. Of what is beyond
# PyTorch warns, and runs it as without --compile.
_MAX_PROGRAMS = 64


class Strategy(ABC):
    """The five steps, in the order in which `train.py` takes them, and what the worker asks on the way."""

    gpu: int | None = None
    """Number of this rank's GPU among those that it sees, None for the CPU; chosen in `init`."""
    collectives: Collectives
    """What the engine says to the other ranks; there from `init` on."""
    steps_in_flight = 1
    """Steps that may be under way before the engine looks at the loss of the first."""
    reduction: Reduction
    """How gradients are combined; there from `wrap` on."""
    cuts_network = False
    """Whether each rank of the default process group has other parameters than the others."""

    def __init__(self, placement: Placement, flags: StrategyConfig, *, device: str = "auto") -> None:
        """`device`: auto, cpu or cuda."""
        self.placement, self.flags, self._wanted_device = placement, flags, device

    @abstractmethod
    def init(self) -> None:
        """1. Learn who the others are."""

    def pin_device(self) -> torch.device:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        torch.set_num_threads(threads_per_rank(self.placement, slices=self.flags.slices))
        keep_freed_memory()
        self.device = torch.device("cpu")
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
            self.device = torch.device("cuda", self.gpu)
        return self.device

    def choose_device(self) -> None:
        """Choose a GPU or the CPU: how ranks communicate depends on it. `init` calls it, before anything else."""
        num_gpus = self.count_gpus()
        self.gpu = choose_gpu(self._wanted_device, self.placement, num_gpus)
        report_choice(self.gpu, self._wanted_device, self.placement, num_gpus)

    def count_gpus(self) -> int:
        """GPUs that this rank sees and could train on."""
        # PyTorch counts those of a driver that is too old for it, too.
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def serve(self) -> bool:
        """Whether this rank only computes for another one that trains; returns when that one is gone."""
        return False

    def scope(self) -> contextlib.AbstractContextManager:
        """The network and the optimizer are made inside it: on this rank's device."""
        return self.device

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied; the only place that looks at --slices.

        Returns: what to call in a training step in place of `network`, and the optimizer.
        """
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(network, self.sum_over_ranks)
        reduce = self.reduce_in_order if self.flags.slices else self.reduce
        self.reduction = reduce(network, optimizer)
        return self.reduction.model, self.reduction.optimizer

    @abstractmethod
    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    def compiled(self, module: torch.nn.Module) -> torch.nn.Module:
        """`module`, of whose passes torch.compile makes programs when they first run; as it is without --compile.

        With --recompute, its blocks forget what they computed.

        They are inside of what averages gradients, as PyTorch's guides have it, and inside of the module's hooks: with
        those of FSDP, `module.compile()` compiles nothing, without a word. Each size of a batch has a program of its
        own, which is faster than one for all.
        """
        if self.flags.recompute:
            recompute_blocks(module)
        if self.flags.compile:
            set_max_programs(_MAX_PROGRAMS)
            for layer in module.modules():
                if isinstance(layer, GlobalBatchNorm):  # what the ranks say to each other is nothing to compile
                    layer.forward = torch.compiler.disable(layer.forward)  # pyright: ignore[reportAttributeAccessIssue]
            module.forward = torch.compile(module.forward, dynamic=False)
        return module

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        """Have the strategy's library combine gradients."""
        return Reduction(self.compiled(network), optimizer)

    def reduce_in_order(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Ordered:
        """With --slices: have gradients combined in one fixed order."""
        return Ordered(self.compiled(network), optimizer, self.ordered_sum(), self.bucket_megabytes())

    def ordered_sum(self) -> OrderedSum:
        """Return what adds up vectors of slices over all ranks."""
        assert self.flags.num_slices is not None
        return OrderedSum(self.flags.num_slices, self.placement.rank, self.placement.world_size, self._exchange())

    def bucket_megabytes(self) -> Sequence[float]:
        """Return how many megabytes of slices' gradients fill a bucket: the first one, ..., and all others."""
        if self.placement.world_size == 1:
            return [math.inf]
        return [FIRST_BUCKET, BUCKET] if self.flags.bucket_size is None else [self.flags.bucket_size]

    def _exchange(self) -> Exchange | None:
        """Return how tensors travel between ranks, where there are several."""
        return None

    # What the worker asks.

    def sum_over_ranks(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place; the name is the same on all ranks and no other sum's."""
        return tensor

    def eval_pass(self, one_pass: EvalPass) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
        """Return `one_pass` as all ranks call it."""
        return one_pass

    def overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        """Return whether `overflow` is above 0 on any rank; here all ranks have the same gradients."""
        return bool(overflow)

    # What each rank holds of the state.

    def copies(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The whole of a weight on each device of this process; all ranks call it."""
        return [tensor]

    def replicas(self, tensor: torch.Tensor) -> Sequence[np.ndarray]:
        """The same as arrays."""
        return [copy.detach().cpu().numpy() for copy in self.copies(tensor)]

    def shard(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """What this rank holds of `array`, as it holds `like`."""
        return torch.from_numpy(array.copy()).to(like.device)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The whole state, of which this rank holds `tensors`; nothing but on rank 0, or in an elastic job.

        All ranks call it.
        """
        arrays = {}
        for name, tensor in tensors.items():
            [array] = self.replicas(tensor)
            if self.placement.rank == 0 or self.flags.elastic:
                arrays[name] = array
        return arrays

    # What is reported.

    def pending_tensors(self) -> Sequence[str]:
        """See `common.training.worker.Worker`."""
        return ()

    def metrics(self) -> dict[str, float]:
        """What the strategy measures besides, for the report of the run."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that communicate."""
        return {}


def replace_parameters(
    optimizer: torch.optim.Optimizer, replacement: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    """Give an optimizer that remembers nothing yet the parameters that replace its own, and no others."""
    for group in optimizer.param_groups:
        group["params"] = [replacement[parameter] for parameter in group["params"] if parameter in replacement]
