"""Observes torch.distributed: the process group, its collectives, and DistributedDataParallel."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from allstep.commands.prove.observer import pytorch_models
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.records import Collective, World, Wrapped

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Their names in torch 2.14, where the function of the old name calls that of the new one."""


def install(observer: Observer) -> None:
    """Hook torch.distributed."""
    if not torch.distributed.is_available():
        return

    def wrap_init(init: Any) -> Any:
        @functools.wraps(init)
        def observed(*args: Any, **kwargs: Any) -> None:
            with observer.waiting("init_process_group"):
                init(*args, **kwargs)
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            observer.write(World("torch.distributed", rank, size, observer.line()))

        return observed

    def wrap_collective(kind: str, call: Any) -> Any:
        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if observer.is_inside:
                return call(*args, **kwargs)
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            shape = tuple(tensors[0].shape) if tensors else ()
            observer.write(Collective(kind, "", shape, observer.line()))
            with observer.waiting(kind):
                return call(*args, **kwargs)

        return observed

    def wrap_ddp(init: Any) -> Any:
        @functools.wraps(init)
        def observed(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            with observer.waiting("DistributedDataParallel"):
                init(wrapper, *args, **kwargs)
            pytorch_models.hold(wrapper)
            finds_unused = wrapper.find_unused_parameters
            observer.write(Wrapped("DistributedDataParallel", observer.line(), finds_unused=finds_unused))

        return observed

    replace_everywhere("torch.distributed", distributed_c10d, "init_process_group", wrap_init)
    for old in _COLLECTIVES:
        new = _RENAMED.get(old, old)
        name = new if hasattr(distributed_c10d, new) else old
        replace_everywhere("torch.distributed", distributed_c10d, name, functools.partial(wrap_collective, name))
    replace(DistributedDataParallel, "__init__", wrap_ddp)
