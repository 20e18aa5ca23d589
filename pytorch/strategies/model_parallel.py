"""Model parallel: the network is cut over processes, and portions of a batch flow through them as in a pipeline.

Every rank is a stage: a run of layers. It hands its activations on to the next stage and gets their gradients back;
while a stage computes one portion, its neighbours compute others (Narayanan et al. 2019, schedule 1F1B).

Each batch is cut into equal portions: the most that its size allows, up to --micro-batches, so one where the size is a
large prime. None is filled up: what fills it would enter batch norm, which normalises each portion by itself.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load, save
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.functional import cross_entropy

from allstep.common.sharding import rank_slice
from allstep.pytorch.strategies.process_group import ProcessGroup, broadcast_from_rank_0


class ModelParallel(ProcessGroup):
    """The five steps in a pipeline: `wrap` cuts the network instead of averaging gradients.

    All stages take the same samples. So for the engine there is one rank that reads them, and no weights to compare.
    """

    def init(self) -> None:
        super().init()
        self.rank, self.world_size = 0, 1
        self._stage_number, self._last = self.place.rank, self.flags.stages - 1
        self._loss_weight = 0.0
        self._schedules: dict[tuple[int, bool], PipelineScheduleSingle] = {}

    def put(self, network: torch.nn.Module, device: torch.device) -> None:
        self._device = device

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Keep this stage's layers; of the others `network` keeps names and shapes alone."""
        broadcast_from_rank_0(network)
        begin, end = self._cut(network)
        stage = network[begin:end].to(self._device)
        # Convolutions leave the channels last in memory, and only what lies in the order of its axes can be sent.
        stage.register_forward_hook(lambda _module, _inputs, output: output.contiguous())
        for index, layer in enumerate(network):
            if not begin <= index < end:
                layer.to("meta")
        [group] = optimizer.param_groups
        group["params"] = list(stage.parameters())
        return stage, optimizer

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Done in `wrap`, before a rank had but a part."""

    def _cut(self, network: torch.nn.Module) -> tuple[int, int]:
        """This stage's layers [begin, end): each stage has as many layers with weights as any other, or one less."""
        weighted = [index for index, layer in enumerate(network) if any(True for _ in layer.parameters())]
        first, after = rank_slice(0, len(weighted), rank=self._stage_number, world_size=self.flags.stages)
        begin = weighted[first] if first else 0
        return begin, weighted[after] if after < len(weighted) else len(network)

    def forward_backward(
        self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, loss_weight: float
    ) -> torch.Tensor:
        """Returns: the sum of losses on the last stage, 0 on the others."""
        schedule = self._schedule(model, len(images), training=True)
        self._loss_weight, losses = loss_weight, []
        if self._stage_number < self._last:
            schedule.step(*self._input(images), return_outputs=False)
            return torch.zeros(())
        schedule.step(*self._input(images), target=labels, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() / loss_weight

    def forward(self, model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor | None:
        """Returns: logits on the last stage, None on the others."""
        return self._schedule(model, len(images), training=False).eval(*self._input(images))

    def _input(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (images,) if self._stage_number == 0 else ()

    def _schedule(self, model: torch.nn.Module, num_samples: int, *, training: bool) -> PipelineScheduleSingle:
        """A stage agrees with its neighbours on the shape of its portions once, so each size has its own schedule."""
        if (num_samples, training) not in self._schedules:
            num_portions = max(number for number in range(1, self.flags.micro_batches + 1) if num_samples % number == 0)
            stage = PipelineStage(model, self._stage_number, self.flags.stages, self._device)
            # With fewer portions than stages there is nothing to alternate, and 1F1B refuses them.
            kind = Schedule1F1B if num_portions >= self.flags.stages else ScheduleGPipe
            # The losses are sums over samples, and so are the gradients.
            loss = self._loss if training else None
            self._schedules[num_samples, training] = kind(stage, num_portions, loss_fn=loss, scale_grads=False)
        return self._schedules[num_samples, training]

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float(), labels, reduction="sum") * self._loss_weight

    def gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        own = {name: self.whole(tensor) for name, tensor in tensors.items()}
        if self.place.rank:
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

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        """The last stage alone knows losses; it has those of all samples."""
        sums = torch.from_numpy(values.copy())
        dist.broadcast(sums, self._last)
        return sums.numpy()

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(()))
