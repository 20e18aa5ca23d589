"""State of a network, its optimizer and the observers of its steps in a checkpoint, for any number of ranks."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from allstep.common.checkpoint.state import ArrayShape
from allstep.pytorch.kept import network_state
from allstep.pytorch.kept.extra_state import is_dense
from allstep.pytorch.kept.pass_state import pass_state, running_statistics
from allstep.pytorch.kept.snapshot import Snapshot
from allstep.pytorch.optimizers.state import OptimizerState, put_back, remembered
from allstep.pytorch.settings import Settings
from allstep.pytorch.step import Step
from allstep.pytorch.strategies.strategy import Strategy


class State:
    """Reads and writes the state of a run; `common.training.worker.Worker` says what most methods do."""

    def __init__(
        self, network: torch.nn.Module, optimizer_state: OptimizerState, step: Step, strategy: Strategy
    ) -> None:
        """`network` has the weights under their canonical names; those of other ranks are on the device meta."""
        self._network, self._optimizer_state, self._step, self._strategy = network, optimizer_state, step, strategy
        self._settings = Settings(lambda: local_parameters(network), step.optimizer, optimizer_state.options)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        averaged = {id(one) for one in running_statistics(self._network)}  # these differ between ranks
        scratch = pass_state(self._network).scratch
        buffers = (
            (name, one)
            for name, one in self._network.named_buffers()
            if is_dense(one) and not one.is_meta and id(one) not in averaged and name not in scratch
        )
        return (
            (name, array)
            for name, one in itertools.chain(local_parameters(self._network), buffers)
            for array in self._strategy.replicas(one)
        )

    def export_weights(self) -> dict[str, np.ndarray]:
        return self._strategy.gather(dict(network_state.weights(self._network)))

    def shapes(self) -> dict[str, ArrayShape]:
        shapes = {f"model/{name}": shape for name, shape in network_state.shapes(self._network)}
        shapes |= self._optimizer_state.shapes(list(self._network.named_parameters()))
        shapes |= self._settings.shapes()
        for observer in self._step.observers:
            shapes |= {name: network_state.array_shape(like) for name, like in observer.kept()}
        return shapes

    def export(self) -> dict[str, np.ndarray]:
        state = {f"model/{name}": tensor for name, tensor in network_state.entries(self._network)}
        state |= self._optimizer_state.export(list(local_parameters(self._network)), self._step.num_steps)
        state |= self._settings.export()
        for observer in self._step.observers:
            state |= observer.state
        return self._strategy.gather(state)

    def load(self, arrays: Mapping[str, np.ndarray], num_steps: int) -> None:
        self._step.num_steps, shard = num_steps, self._strategy.shard
        network_state.load_arrays(self._network, arrays, shard)
        self._optimizer_state.load(list(local_parameters(self._network)), arrays, num_steps, shard)
        self._settings.load(arrays)
        for observer in self._step.observers:
            observer.state = {
                name: shard(arrays[name], like.detach())
                for name, like in observer.kept()
                if name in arrays and not like.is_meta
            }

    def average_statistics(self) -> None:
        statistics = list(running_statistics(self._network))
        collectives = self._strategy.collectives
        if not statistics or collectives.world_size == 1:
            return
        own = torch.cat([buffer.flatten() for buffer in statistics]).double().cpu().numpy()
        mean = torch.from_numpy(collectives.all_reduce_sum(own) / collectives.world_size)
        for buffer, values in zip(statistics, mean.split([buffer.numel() for buffer in statistics]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def snapshot(self) -> Any:
        """Return a copy of this rank's state, for `restore`."""
        states = [copy.deepcopy(one.state) for one in self._step.observers]
        return Snapshot(self._network), remembered(self._step.optimizer), self._step.num_steps, states

    def restore(self, snapshot: Any) -> None:
        """Put back what `snapshot` returned."""
        network, before, self._step.num_steps, states = snapshot
        network.restore()
        put_back(self._step.optimizer, before)
        for observer, state in zip(self._step.observers, states, strict=True):
            observer.state = state


def local_parameters(network: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield names and parameters that this rank holds of a network."""
    return ((name, tensor) for name, tensor in network.named_parameters() if not tensor.is_meta)
