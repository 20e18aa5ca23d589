"""Fully sharded data parallel: as DDP, but each rank keeps a part of every weight, gradient and optimizer slot.

A layer's weights are gathered just before they are used and dropped after; its gradients are averaged and cut in
one reduce-scatter (Rajbhandari et al. 2020, ZeRO stage 3). There is one copy of each weight, so the replica check
holds by construction; it shows that all ranks gather the same.

With --slices all weights are gathered once a step, for as long as a rank computes its slices, and gradients are whole
until they are added up; each rank then keeps its part of the sum.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import SUM_OF_SLICES, many_gradients
from allstep.pytorch.kept.network_state import as_bytes, can_train, sharing_memory
from allstep.pytorch.kept.pass_state import pass_state
from allstep.pytorch.kept.snapshot import Snapshot
from allstep.pytorch.kept.uses import is_open, kept_elsewhere
from allstep.pytorch.optimizers import without_fused_kernels
from allstep.pytorch.passes import ReducedPass, TrainPass
from allstep.pytorch.strategies.ordered_sum import OrderedScatter
from allstep.pytorch.strategies.process_group import ProcessGroup
from allstep.pytorch.strategies.reduction import Ordered, Reduction
from allstep.pytorch.strategies.strategy import replace_parameters


def layers_of(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the children of `network`; of a list of modules, which computes nothing itself, the modules."""
    for child in network.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from layers_of(child)
        else:
            yield child


def stands_alone(layer: torch.nn.Module, uses: Counter[int]) -> bool:
    """Return whether FSDP may gather a layer by itself: only its own forward uses its weights, and it has some."""
    if isinstance(layer, (torch.nn.ParameterList, torch.nn.ParameterDict)) or is_open(layer):
        return False
    own = Counter(id(tensor) for _, tensor in layer.named_parameters(remove_duplicate=False))
    return bool(own) and all(uses[tensor] == number for tensor, number in own.items())


def _unfit(network: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each part that FSDP cannot cut, what it needs in its place, and the reason with advice."""
    parameters, modules, state = dict(network.named_parameters()), dict(network.named_modules()), pass_state(network)
    changed, sharing = {*state.constant_changes, *state.sample_dependent}, sharing_memory(network)
    if any(type(one).train is not torch.nn.Module.train for one in modules.values()):
        before = Snapshot(network)
        network.eval()  # in which some add weights to others
        changed |= before.changes()
        network.train()
        before.restore()
    for name, one in modules.items():
        if isinstance(one, torch.jit.ScriptModule):
            why = ", a script, whose weights cannot be exchanged; pass the module, or give"
            yield name or "the network", "modules of Python", why
        if getattr(one, "sparse", False) is True:
            yield name, "dense gradients", ", which has sparse ones; build it with sparse=False, or give"
    for name, one in parameters.items():
        if one.dim() == 0:
            yield name, "weights with an axis", ", a single number; give it the shape (1,), or use"
        if not one.numel():
            yield name, "weights with numbers", ", which has none; leave it out, or give"
        if name in changed:
            why = ", which the network changes by itself, when ranks have copies that are dropped; give"
            yield name, "weights that the optimizer alone changes", why
    if name := kept_elsewhere(network):
        why = ", which the network uses through a variable or a list of its own; use it through its module, or give"
        yield name, "weights that modules alone hold", why
    for one, other in sharing:
        if one in parameters or other in parameters:
            why = ", which share it, and would not once they are cut; use one of them in both places, or give"
            yield f"{one} and {other}", "weights with memory of their own", why
    if state.hooked_weight:
        why = ", which shards replace; remove them, or give"
        yield f"hooks of {state.hooked_weight}", "weights without hooks", why


class FSDP(ProcessGroup):
    """The five steps in FSDP; `ProcessGroup` has the first, `Strategy` the second."""

    ordered_sum_of = OrderedScatter

    def scope(self) -> contextlib.AbstractContextManager:
        """Build the network in the host's memory: no device need hold all of it."""
        return contextlib.nullcontext()

    def reduce(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Reduction:
        gradients = many_gradients([name for name, _ in network.named_parameters()])
        whole, shard = self._begin(network)
        uses = Counter(id(tensor) for _, tensor in network.named_parameters(remove_duplicate=False))
        names = {module: name for name, module in network.named_modules()}
        layers = {names[layer]: layer for layer in layers_of(network) if stands_alone(layer, uses)}
        for layer in layers.values():
            self.compiled(layer)  # one layer at a time: between two layers weights are gathered and dropped
            shard(layer)  # moves the layer to the device, where only this rank's part stays
        shard(network)
        replace_parameters(optimizer, dict(zip(whole, network.parameters(), strict=True)))
        if isinstance(optimizer, torch.optim.SGD):  # which has no fused kernel for DTensor (torch 2.14)
            without_fused_kernels(optimizer)
        return _Shards(network, optimizer, gradients, SameLayers(network, layers, self.collectives))

    def reduce_in_order(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Ordered:
        whole, shard = self._begin(network)
        sharded = shard(self.compiled(network), reshard_after_forward=False)
        sharded.set_reshard_after_backward(False)
        sharded.set_requires_gradient_sync(False)
        replace_parameters(optimizer, dict(zip(whole, network.parameters(), strict=True)))
        return _OrderedShards(network, optimizer, self.ordered_sum(), self.bucket_megabytes())

    def _begin(self, network: torch.nn.Module) -> tuple[list[torch.nn.Parameter], Callable[..., FSDPModule]]:
        """Return the parameters before they are cut, and the function that cuts those of a module."""
        for name, expected, why in _unfit(network):
            raise UserError(f"expected {expected} for --strategy fsdp, received {name}{why} --strategy ddp")
        for parameter in network.parameters():
            parameter.data = parameter.data.contiguous()  # it is cut along its first axis
        self._broadcast_bytes(as_bytes(network))
        mesh = init_device_mesh(self.device.type, (self.placement.world_size,))
        uncut = {one for one in network.parameters() if not can_train(one)}  # torch 2.9 cuts none of these
        for parameter in uncut:
            parameter.data = parameter.data.to(self.device)
        return list(network.parameters()), partial(fully_shard, mesh=mesh, ignored_params=uncut)

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Already done in `wrap`, before the weights were cut."""

    def overflowed_anywhere(self, overflow: torch.Tensor) -> bool:
        return bool(self.sum_over_ranks(overflow, "overflow"))

    def copies(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor]

    def shard(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        tensor = super().shard(array, like)
        if not isinstance(like, DTensor):
            return tensor
        # Every rank has the whole array: nothing needs to be sent.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class _Shards(Reduction):
    """FSDP's own reduce-scatters."""

    def __init__(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: str, same_layers: SameLayers
    ) -> None:
        super().__init__(network, optimizer)
        self._gradients, self._same_layers = gradients, same_layers

    def train_pass(self, one_pass: TrainPass) -> ReducedPass:
        model = self.model
        assert isinstance(model, FSDPModule)  # which fully_shard makes of any module

        def reduced(inputs: torch.Tensor, targets: torch.Tensor, loss_weight: float, *, is_last: bool) -> torch.Tensor:
            model.set_requires_gradient_sync(is_last)
            loss_sum = one_pass(inputs, targets, loss_weight)
            self._same_layers.end_pass()
            return loss_sum

        return reduced

    def wait(self, loss_sum: torch.Tensor) -> torch.Tensor:
        self._same_layers.check_gradients()
        return loss_sum

    def pending_tensors(self) -> Sequence[str]:
        # FSDP does not tell which of them is under way.
        return (f"an all-gather of weights or the reduce-scatter of {self._gradients}",)


class _OrderedShards(Ordered):
    """Sums of whole gradients of slices, of which each rank keeps its part."""

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        sharded = self.model
        assert isinstance(sharded, FSDPModule)
        sharded.unshard()
        try:
            yield
        finally:
            sharded.reshard()

    def as_gradient(self, own: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        part = own.view_as(parameter.to_local())
        mesh, placements = parameter.device_mesh, parameter.placements
        return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())

    def pending_tensors(self) -> Sequence[str]:
        return (f"an all-gather of weights or {SUM_OF_SLICES}",)


_END = -1  # number of the layer after the last


class SameLayers:
    """Checks that all passes on all ranks use the same layers: compares the first pass over ranks, and others with it.

    FSDP matches the layers of ranks by their order alone. Two ranks at different layers would get parts of each other's
    weights, which goes unnoticed if both have the same size.
    """

    def __init__(self, network: torch.nn.Module, layers: Mapping[str, torch.nn.Module], ranks: Collectives) -> None:
        """Watch the passes of a network whose `layers` are gathered one by one; call this after `fully_shard`."""
        self._names, self._ranks = [*layers], ranks
        self._parameters = dict(network.named_parameters())
        self._used, self._first = list[int](), dict[bool, list[int]]()
        self._missing: list[bool] | None = None
        if ranks.world_size > 1:
            network.register_forward_pre_hook(lambda *_: self._used.clear(), prepend=True)
            for number, layer in enumerate(layers.values()):
                layer.register_forward_pre_hook(lambda *_, number=number: self._see(number), prepend=True)
            network.register_forward_hook(lambda *_: self._end_forward())

    def end_pass(self) -> None:
        """End a training pass, including its backward part, in which --recompute uses layers again.

        Raises UserError if this rank has not used the layers of the first pass.
        """
        if self._ranks.world_size > 1:
            self._see(_END)
            self._first.setdefault(True, [*self._used])

    def check_gradients(self) -> None:
        """Compare which parameters have no gradient before the optimizer sees the others.

        Raises UserError if they are not those of the first step, or of another rank.
        """
        missing = [one.requires_grad and one.grad is None for one in self._parameters.values()]
        if self._missing is None:
            counts = self._ranks.all_reduce_sum(np.array(missing, np.float64))
            self._missing = [bool(count) for count in counts]
        for name, one, other in zip(self._parameters, missing, self._missing, strict=True):
            if one != other and self._parameters[name].requires_grad and self._ranks.world_size > 1:
                raise _refused(name)

    def _see(self, number: int) -> None:
        """Note a layer before its weights are gathered."""
        place, kind = len(self._used), torch.is_grad_enabled()
        if kind in self._first:
            expected = self._first[kind][place : place + 1]
        else:
            expected = {int(other) for [other] in self._ranks.all_gather(np.array([number]))}
        if {number} != set(expected):
            raise _refused(self._names[max({number, *expected})])
        self._used.append(number)

    def _end_forward(self) -> None:
        self._see(_END)
        if not torch.is_grad_enabled():
            self._first.setdefault(False, [*self._used])


def _refused(name: str) -> UserError:
    return UserError(
        f"--strategy fsdp needs the same layers in all passes on all ranks, {name} is used in some alone; give "
        "--slices of at least as many as there are ranks, or --strategy ddp --find-unused-parameters"
    )
