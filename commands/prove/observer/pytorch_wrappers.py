"""Know which wrapper averages the gradients of which weights, and what keeps it from that."""

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from allstep.commands.prove.observer.pytorch_values import is_shard
from allstep.commands.prove.records import RUNNING


class Wrappers:
    """Wrappers of one process."""

    def __init__(self) -> None:
        self._lines: dict[int, str] = {}  # by parameter
        self._ddp: dict[int, weakref.ref[DistributedDataParallel]] = {}  # by parameter
        self._synchronizes: dict[int, bool] = {}  # by DDP that has been called since the last step
        self._sharded: set[int] = set()
        self._sent_buffers: set[int] = set()
        self._inner: list[torch.nn.Module] = []

    def cover(self, parameters: Iterable[torch.Tensor], line: str) -> None:
        """Note that the wrapper made in a line averages the gradients of these parameters."""
        self._lines.update((id(parameter), line) for parameter in parameters)

    def cover_by_ddp(self, wrapper: DistributedDataParallel, line: str) -> None:
        """Note that DistributedDataParallel averages the gradients of its model."""
        self.cover(wrapper.parameters(), line)
        self._ddp.update((id(parameter), weakref.ref(wrapper)) for parameter in wrapper.parameters())
        self._inner.append(wrapper.module)
        if wrapper.broadcast_buffers:
            self._sent_buffers.update(map(id, wrapper.buffers()))

    def shard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that each rank has a shard of these parameters."""
        self._sharded.update(map(id, parameters))

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Return whether each rank has a shard of a parameter."""
        return is_shard(parameter) or id(parameter) in self._sharded

    def is_kept_alike(self, tensor: torch.Tensor, name: str) -> bool:
        """Return whether ranks have shards of a tensor, or it is a running statistic of which DDP sends rank 0's."""
        return self.is_sharded(tensor) or (id(tensor) in self._sent_buffers and name.endswith(RUNNING))

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Note that DistributedDataParallel is called, and whether it will average."""
        self._synchronizes[id(wrapper)] = bool(wrapper.require_backward_grad_sync)

    def is_inner(self, model: torch.nn.Module) -> bool:
        """Return whether DistributedDataParallel holds a model."""
        return any(model is inner for inner in self._inner)

    def line_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, int]:
        """Return the line of the parameters' wrapper, and how many parameters have none."""
        lines = [self._lines.get(id(parameter), "") for parameter in parameters]
        return next(filter(None, lines), ""), lines.count("")

    def bypass_of(self, parameters: Sequence[torch.Tensor]) -> str:
        """Return what has kept DistributedDataParallel from averaging before a step, and start over."""
        found = (self._ddp.get(id(parameter)) for parameter in parameters)
        wrappers = {id(wrapper): wrapper for one in found if one and (wrapper := one())}
        calls = [self._synchronizes.pop(key, None) for key in wrappers]
        return "inner" if None in calls else "no_sync" if False in calls else ""
