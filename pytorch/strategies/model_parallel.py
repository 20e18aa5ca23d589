"""Model parallel: the network is cut over processes, and micro-batches flow through them as in a pipeline.

Every rank is a stage: a run of layers. It hands its activations on to the next stage and gets their gradients back;
while a stage computes one micro-batch, its neighbours compute others (Narayanan et al. 2019, schedule 1F1B).

Each batch is cut into equal micro-batches: the most that its size allows, up to --micro-batches, so one where the size
is a large prime. None is filled up: what fills it would enter batch norm, which normalises each by itself.
"""

from __future__ import annotations

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

from allstep.common.data.sharding import rank_slice
from allstep.pytorch.compat import known_arguments
from allstep.pytorch.strategies.process_group import (
    ProcessGroup,
    ProcessGroupCollectives,
    broadcast_from_rank_0,
    sum_over_ranks,
)
from allstep.pytorch.strategies.strategy import CompiledTrainStep, EvalStep, TrainStep, optimizer_of

# torch 2.9 returns them in any case.
_NO_OUTPUTS = known_arguments(Schedule1F1B.step, return_outputs=False)


class ModelParallel(ProcessGroup):
    """The five steps in a pipeline: `wrap` cuts the network instead of averaging gradients.

    All stages take the same samples. So for the engine there is one rank that reads them, and no weights to compare.
    """

    cuts_network = True

    def init(self) -> None:
        super().init()
        self._stage_number, self._last = self.placement.rank, self.flags.stages - 1
        self.collectives = PipelineCollectives(rank=0, world_size=1, last=self._last)

    def scope(self) -> contextlib.AbstractContextManager:
        """In the host's memory, from where each stage takes its layers."""
        return contextlib.nullcontext()

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Keep this stage's layers; of the others `network` keeps names and shapes alone."""
        assert isinstance(network, torch.nn.Sequential)
        broadcast_from_rank_0(network)
        begin, end = self._cut(network)
        stage = network[begin:end].to(self.device)
        # Convolutions leave the channels last in memory, and only what lies in the order of its axes can be sent.
        stage.register_forward_hook(lambda _module, _inputs, output: output.contiguous())
        for index, layer in enumerate(network):
            if not begin <= index < end:
                layer.to("meta")
        return stage, optimizer_of(optimizer, {parameter: parameter for parameter in stage.parameters()})

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Done in `wrap`, before a rank had but a part."""

    def _cut(self, network: torch.nn.Sequential) -> tuple[int, int]:
        """This stage's layers [begin, end): each stage has as many layers with weights as any other, or one less."""
        weighted = [index for index, layer in enumerate(network) if any(True for _ in layer.parameters())]
        first, after = rank_slice(0, len(weighted), rank=self._stage_number, world_size=self.flags.stages)
        begin = weighted[first] if first else 0
        return begin, weighted[after] if after < len(weighted) else len(network)

    def compile_train_step(self, step: TrainStep) -> CompiledTrainStep:
        """The compiled step returns the sum of losses on the last stage, 0 on the others."""
        weight = 0.0

        def weighted_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return step.loss(logits, targets) * weight

        schedule = self._schedules(step.model, weighted_loss)

        def compiled(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            nonlocal weight
            weight, losses = loss_weight, []
            if self._stage_number < self._last:
                schedule(len(inputs)).step(*self._input(inputs), **_NO_OUTPUTS)
                return torch.zeros(())
            schedule(len(inputs)).step(*self._input(inputs), target=targets, losses=losses, **_NO_OUTPUTS)
            return torch.stack(losses).sum().detach() / loss_weight

        return compiled

    def compile_eval_step(self, step: EvalStep) -> Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]:
        """The compiled step returns the score on the last stage, 0 on the others."""
        schedule = self._schedules(step.model, None)

        def compiled(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
            logits = schedule(len(inputs)).eval(*self._input(inputs))
            return (0.0, 0.0) if logits is None else step.score(logits, targets)

        return compiled

    def _input(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (inputs,) if self._stage_number == 0 else ()

    def _schedules(
        self, model: torch.nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    ) -> Callable[[int], PipelineScheduleSingle]:
        """A stage agrees with its neighbours on the shape of its micro-batches once: a schedule a number of samples."""

        @functools.cache
        def schedule(num_samples: int) -> PipelineScheduleSingle:
            number = max(number for number in range(1, self.flags.micro_batches + 1) if num_samples % number == 0)
            stage = PipelineStage(model, self._stage_number, self.flags.stages, self.device)
            # With fewer micro-batches than stages there is nothing to alternate, and 1F1B refuses them.
            kind = Schedule1F1B if number >= self.flags.stages else ScheduleGPipe
            # The losses are sums over samples, and so are the gradients.
            return kind(stage, number, loss_fn=loss, scale_grads=False)

        return schedule

    def _overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        return bool(sum_over_ranks(overflow, "overflow"))

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


@dataclass(frozen=True)
class PipelineCollectives(ProcessGroupCollectives):
    """All stages are one rank to the engine. The last one alone knows losses, and has those of all samples."""

    last: int
    """Rank of the process group that is the last stage."""

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        sums = torch.from_numpy(values.copy())
        dist.broadcast(sums, self.last)
        return sums.numpy()

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(()))
