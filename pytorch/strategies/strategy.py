"""What a strategy is: how the ranks are formed and how gradients meet. TensorFlow's has the same methods."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch

from allstep.common.base.collectives import Collectives
from allstep.common.base.memory import keep_freed_memory
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.devices import choose_gpu, report_choice
from allstep.common.launch.placement import Placement, threads_per_rank
from allstep.pytorch.compat import set_max_programs, unscale
from allstep.pytorch.recompute import recompute_blocks
from allstep.pytorch.strategies.batch_norm import GlobalBatchNorm
from allstep.pytorch.strategies.ordered_sum import Exchange, OrderedSum

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
    fused_sgd = True
    """Whether PyTorch has a kernel that updates many of its parameters by SGD."""
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

    @abstractmethod
    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied.

        Returns: what to call in a training step in place of `network`, and the optimizer.
        """

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

    # What the worker calls in place of its own steps.

    def compile_train_step(self, step: TrainStep) -> CompiledTrainStep:
        """Have the gradients of `step` meet those of the other ranks."""
        return lambda inputs, targets, loss_weight, *, is_last: step(inputs, targets, loss_weight)

    def compile_eval_step(self, step: EvalStep) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
        """Have `step` use weights that this rank may not have as a whole."""
        return step

    def ordered_sum(self) -> OrderedSum:
        """With --slices: what adds up their vectors over all ranks."""
        assert self.flags.num_slices is not None
        return OrderedSum(self.flags.num_slices, self.placement.rank, self.placement.world_size, self._exchange())

    def _exchange(self) -> Exchange | None:
        """How tensors travel between ranks, where there are several."""
        return None

    def whole_weights(self) -> contextlib.AbstractContextManager:
        """With --slices: within it the network has whole weights on every rank; all ranks call it.

        Ranks may have different numbers of slices, so that they cannot gather weights in each pass.
        """
        return contextlib.nullcontext()

    def as_gradient(self, own: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        """`own`, what this rank has of a gradient in one axis, as the gradient of its `parameter`."""
        return own.view_as(parameter)

    def apply_unscaled(self, optimizer: torch.optim.Optimizer, loss_scale: float, apply: Callable[[], None]) -> bool:
        """Divide the averaged gradients by `loss_scale`, and `apply` them unless one is not finite.

        Returns: whether it was so, on any rank: then no rank has changed anything.
        """
        gradients = [
            self._local_part(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        overflowed = self._overflowed_anywhere(unscale(gradients, loss_scale, self.device))
        if not overflowed:
            apply()
        return overflowed

    def _local_part(self, gradient: torch.Tensor) -> torch.Tensor:
        """What this rank has of a gradient."""
        return gradient

    def _overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        """Whether `overflow` is above 0 on any rank; here all ranks have the same gradients, and so the same answer."""
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


def optimizer_of(
    optimizer: torch.optim.Optimizer, replacement: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer like `optimizer`, in the same groups, of the parameters that replace its own; of no others."""
    groups = [
        {**group, "params": [replacement[parameter] for parameter in group["params"] if parameter in replacement]}
        for group in optimizer.param_groups
    ]
    return cast("Callable[..., torch.optim.Optimizer]", type(optimizer))(groups)


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A forward and a backward pass: the worker's, before a strategy has made it one of all ranks."""

    model: torch.nn.Module
    """What the strategy's `wrap` returned."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The sum of losses of outputs and targets."""

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float) -> torch.Tensor:
        """Add the gradients of the weighted sum of losses to those of `model`.

        Returns: the sum of the losses.
        """
        loss_sum = self.loss(self.model(inputs), targets)
        # Not loss_sum.backward(weight), an operation less: PyTorch imports SymPy for it, a third of a second a start.
        (loss_sum * loss_weight).backward()
        return loss_sum.detach()


class CompiledTrainStep(Protocol):
    """A `TrainStep` of all ranks."""

    def __call__(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool
    ) -> torch.Tensor:
        """`is_last`: whether this pass is the last one before the optimizer's step: the one in which gradients meet."""
        ...


@dataclasses.dataclass(frozen=True)
class EvalStep:
    """A forward pass, and what it is worth."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The sum of losses of outputs and targets."""
    metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """The sum of what validation measures besides."""

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        return self.score(self.model(inputs), targets)

    def score(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Both sums."""
        return float(self.loss(outputs, targets)), float(self.metric(outputs, targets))
