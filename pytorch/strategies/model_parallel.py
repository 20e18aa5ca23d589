"""Model parallel: the network is cut over processes, and micro-batches flow through them as in a pipeline.

Every rank is a stage: a run of layers. It hands its activations on to the next stage and gets their gradients back;
while a stage computes one micro-batch, its neighbours compute others (Narayanan et al. 2019, schedule 1F1B).

Each batch is cut into equal micro-batches, as many as its size allows, up to --micro-batches: a single one if the size
is a large prime. None is padded, because batch norm normalises each micro-batch by itself and would see the padding.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import StrategyConfig
from allstep.common.data.sharding import rank_slice
from allstep.pytorch.compat import keeps_buffers, known_arguments
from allstep.pytorch.kept.network_state import as_bytes
from allstep.pytorch.passes import EvalPass, ReducedPass, Scored, TrainPass
from allstep.pytorch.strategies.process_group import ProcessGroup, ProcessGroupCollectives
from allstep.pytorch.strategies.reduction import Reduction
from allstep.pytorch.strategies.strategy import replace_parameters

# torch 2.9 returns them in any case.
_NO_OUTPUTS = known_arguments(Schedule1F1B.step, return_outputs=False)


class ModelParallel(ProcessGroup):
    """The five steps in a pipeline: `reduce` cuts the network instead of averaging gradients.

    All stages take the same samples. So for the engine there is one rank that reads them, and no weights to compare.
    """

    cuts_network = True

    def init(self) -> None:
        super().init()
        self._stage_number, self._last = self.placement.rank, self.flags.stages - 1
        self.collectives = PipelineCollectives(rank=0, world_size=1, last=self._last)

    def scope(self) -> contextlib.AbstractContextManager:
        """Build the network in the host's memory, from which each stage takes its layers."""
        return contextlib.nullcontext()

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        """Keep this stage's layers; `network` keeps only names and shapes of the others."""
        assert isinstance(network, torch.nn.Sequential)
        if not keeps_buffers(PipelineStage) and (names := [name for name, _ in network.named_buffers()]):
            raise UserError(
                f"--strategy model-parallel needs torch 2.14 for a network with buffers such as {names[0]}, received "
                f"{torch.__version__}: install that"
            )
        self._broadcast_bytes(as_bytes(network))
        begin, end = self._cut(network)
        stage = network[begin:end].to(self.device)
        # Convolutions leave the channels last in memory, and only what lies in the order of its axes can be sent.
        stage.register_forward_hook(lambda _module, _inputs, output: output.contiguous())
        for index, layer in enumerate(network):
            if not begin <= index < end:
                layer.to("meta")
        replace_parameters(optimizer, {parameter: parameter for parameter in stage.parameters()})
        return _Pipeline(stage, optimizer, self.flags, self._stage_number, self.device)

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Already done in `wrap`, before the network was cut."""

    def _cut(self, network: torch.nn.Sequential) -> tuple[int, int]:
        """Return this stage's layers [begin, end); the numbers of layers with weights differ by at most one."""
        weighted = [index for index, layer in enumerate(network) if any(True for _ in layer.parameters())]
        first, after = rank_slice(0, len(weighted), rank=self._stage_number, world_size=self.flags.stages)
        begin = weighted[first] if first else 0
        return begin, weighted[after] if after < len(weighted) else len(network)

    def eval_pass(self, one_pass: EvalPass) -> Callable[[torch.Tensor, torch.Tensor], Scored]:
        assert isinstance(self.reduction, _Pipeline)
        return self.reduction.eval_pass(one_pass)

    def overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        return bool(self.sum_over_ranks(overflow, "overflow"))

    def gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        own = {name: self.replicas(tensor)[0] for name, tensor in tensors.items()}
        if self.placement.rank:
            # As a file of safetensors: torch's own collective of objects would unpickle what it receives.
            content = torch.frombuffer(bytearray(save(own)), dtype=torch.uint8)
            dist.send(torch.tensor(len(content)), 0)
            dist.send(content, 0)
            return {}
        for stage in range(1, self.flags.stages):
            size = torch.tensor(0)
            dist.recv(size, stage)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, stage)
            own |= load(content.numpy().tobytes())
        return own


class _Pipeline(Reduction):
    """Reduction of a stage, which has the gradients of its own layers only."""

    def __init__(
        self,
        stage: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        flags: StrategyConfig,
        stage_number: int,
        device: torch.device,
    ) -> None:
        super().__init__(stage, optimizer)
        self._flags, self._stage_number, self._last, self._device = flags, stage_number, flags.stages - 1, device

    def train_pass(self, one_pass: TrainPass) -> ReducedPass:
        """Return a pass that returns the sum of losses on the last stage, 0 on the others."""
        weight = 0.0

        def weighted_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return one_pass.loss(logits, targets) * weight

        schedule = self._schedules(one_pass.model, weighted_loss)

        def piped(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            nonlocal weight
            weight, losses = loss_weight, []
            if self._stage_number < self._last:
                schedule(len(inputs)).step(*self._input(inputs), **_NO_OUTPUTS)
                return torch.zeros(())
            schedule(len(inputs)).step(*self._input(inputs), target=targets, losses=losses, **_NO_OUTPUTS)
            return torch.stack(losses).sum().detach() / loss_weight

        return piped

    def eval_pass(self, one_pass: EvalPass) -> Callable[[torch.Tensor, torch.Tensor], Scored]:
        """Return a pass that returns loss and outputs on the last stage, 0 and None on the others."""
        schedule = self._schedules(one_pass.model, None)

        def piped(inputs: torch.Tensor, targets: torch.Tensor) -> Scored:
            logits = schedule(len(inputs)).eval(*self._input(inputs))
            return (0.0, None) if logits is None else one_pass.score(logits, targets)

        return piped

    def _input(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (inputs,) if self._stage_number == 0 else ()

    def _schedules(
        self, model: torch.nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) -> Callable[[int], PipelineScheduleSingle]:
        """Return a function that makes one schedule per number of samples, since stages fix their shapes only once."""

        @functools.cache
        def schedule(num_samples: int) -> PipelineScheduleSingle:
            number = max(number for number in range(1, self._flags.micro_batches + 1) if num_samples % number == 0)
            stage = PipelineStage(model, self._stage_number, self._flags.stages, self._device)
            # With fewer micro-batches than stages there is nothing to alternate, and 1F1B refuses them.
            kind = Schedule1F1B if number >= self._flags.stages else ScheduleGPipe
            # The losses are sums over samples, and so are the gradients.
            return kind(stage, number, loss_fn=loss, scale_grads=False)

        return schedule


@dataclass(frozen=True)
class PipelineCollectives(ProcessGroupCollectives):
    """Collectives of a pipeline, which is one rank to the engine. Only the last stage has losses, of all samples."""

    last: int
    """Rank of the process group that is the last stage."""

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        sums = torch.from_numpy(values.copy())
        dist.broadcast(sums, self.last)
        return sums.numpy()

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(()))
