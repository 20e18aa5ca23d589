"""Fully sharded data parallel: as DDP, but each rank keeps a part of every weight, gradient and optimizer slot.

A layer's weights are gathered just before they are used and dropped after; its gradients are averaged and cut in
one reduce-scatter (Rajbhandari et al. 2020, ZeRO stage 3). There is one copy of each weight, so the replica check
holds of itself; it shows that all ranks gather the same.

With --slices all weights are gathered once a step, for as long as a rank computes its slices, and gradients are whole
until they are added up; each rank then keeps its part of the sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from allstep.common.cli.strategy_flags import SUM_OF_SLICES, many_gradients
from allstep.pytorch.strategies.batch_norm import synchronise_batch_norm
from allstep.pytorch.strategies.ordered_sum import OrderedScatter
from allstep.pytorch.strategies.process_group import ProcessGroup, broadcast_from_rank_0, sum_over_ranks
from allstep.pytorch.strategies.strategy import CompiledTrainStep, TrainStep, optimizer_of


def _layers(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Its children; of a list of modules, which computes nothing itself, the modules."""
    for child in network.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _layers(child)
        else:
            yield child


class FSDP(ProcessGroup):
    """The five steps in FSDP; `ProcessGroup` has the first, `Strategy` the second."""

    fused_sgd = False  # none for DTensor, of torch 2.14

    def scope(self) -> contextlib.AbstractContextManager:
        """In the host's memory: no device need hold the whole network."""
        return contextlib.nullcontext()

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(network, sum_over_ranks)
        self._gradients = many_gradients([name for name, _ in network.named_parameters()])
        broadcast_from_rank_0(network)
        whole = list(network.parameters())
        mesh = init_device_mesh(self.device.type, (self.placement.world_size,))
        if self.flags.slices:
            self._shard_for_slices(network, mesh)
        else:
            for layer in _layers(network):
                if any(True for _ in layer.parameters()):
                    self.compiled(layer)  # and no more at once: between two layers weights are gathered and dropped
                    fully_shard(layer, mesh=mesh)  # one layer after the other goes to the device, and stays in part
            fully_shard(network, mesh=mesh)
        # The shards are new parameters.
        return network, optimizer_of(optimizer, dict(zip(whole, network.parameters(), strict=True)))

    def _shard_for_slices(self, network: torch.nn.Module, mesh: DeviceMesh) -> None:
        self.compiled(network)
        self._sliced = fully_shard(network, mesh=mesh, reshard_after_forward=False)
        self._sliced.set_reshard_after_backward(False)
        self._sliced.set_requires_gradient_sync(False)

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Done in `wrap`, before a rank had but a part."""

    def compile_train_step(self, step: TrainStep) -> CompiledTrainStep:
        if self.flags.slices:  # `SlicedStep` has them meet
            return super().compile_train_step(step)
        model = step.model
        assert isinstance(model, FSDPModule)  # which fully_shard makes of any module

        def compiled(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            model.set_requires_gradient_sync(is_last)
            return step(inputs, targets, loss_weight)

        return compiled

    def ordered_sum(self) -> OrderedScatter:
        assert self.flags.num_slices is not None
        return OrderedScatter(self.flags.num_slices, self.placement.rank, self.placement.world_size, self._exchange())

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        if not self.flags.slices:
            yield
            return
        self._sliced.unshard()
        try:
            yield
        finally:
            self._sliced.reshard()

    def as_gradient(self, own: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        part = own.view_as(parameter.to_local())
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())

    def _local_part(self, gradient: DTensor) -> torch.Tensor:
        return gradient.to_local()

    def _overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        return bool(sum_over_ranks(overflow, "overflow"))

    def pending_tensors(self) -> Sequence[str]:
        # FSDP does not say which of them is under way.
        sum_of_gradients = SUM_OF_SLICES if self.flags.slices else f"the reduce-scatter of {self._gradients}"
        return (f"an all-gather of weights or {sum_of_gradients}",)

    def copies(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor]

    def shard(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        tensor = super().shard(array, like)
        if not isinstance(like, DTensor):
            return tensor
        # Every rank has the whole array: nothing needs to be sent.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
