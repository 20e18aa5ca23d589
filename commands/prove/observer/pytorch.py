"""Observe PyTorch: here the process group, its collectives and parallelism, and the rest by a file each."""

import multiprocessing
import sys
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from allstep.commands.prove.observer import pytorch_data, pytorch_models, pytorch_optimizers
from allstep.commands.prove.observer.guarding import Observation
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_models import Wrappers
from allstep.commands.prove.observer.pytorch_optimizers import Optimizers
from allstep.commands.prove.observer.start import hook_modules
from allstep.commands.prove.records import (
    AVERAGES_WEIGHTS,
    JOIN,
    POINT_TO_POINT,
    TENSOR_PARALLEL,
    Collective,
    World,
    Wrapped,
)
from allstep.common.launch.placement import apparent_rank

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
    *POINT_TO_POINT,
)
_FUNCTIONAL = ("all_gather_tensor", "all_gather_tensor_autograd", "all_reduce", "all_to_all_single", "broadcast")
"""Functional collectives, by which DTensor works as well."""
_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Names of collectives in torch 2.14, in which the function of the old name calls that of the new name."""


def _observing(observer: Observer, optimizers: Optimizers, kind: str, *, by_script: bool = False) -> Observation:
    """Return an observation of a collective, or of the script's own calls of it only."""

    def observe(*args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        if by_script and observer.is_by_library():
            yield
            return
        observer.collectives[kind] += 1
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if tensors and kind in ("all_reduce", "reduce"):
            optimizers.gradients.note_sent(tensors[0])
        if tensors and kind in ("isend", "send") and optimizers.gradients.has_trained(tensors[0]):
            observer.write(Wrapped(kind, observer.line(), AVERAGES_WEIGHTS))  # of neighbours (gossip)
        if observer.is_inside:
            yield
            return
        shape = tuple(tensors[0].shape) if tensors else ()
        observer.write(Collective(kind, "", shape, observer.line(), callers=observer.callers()))
        with observer.waiting(kind):
            yield

    return observe


def _hook_distributed(observer: Observer, wrappers: Wrappers, optimizers: Optimizers) -> None:
    if not torch.distributed.is_available():
        return

    def note_world(*_args: Any, **_kwargs: Any) -> None:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        makers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(None)]
        observer.write(World("torch.distributed", rank, size, observer.line(), tuple(makers[::-1])))

    def note_ddp(wrapper: DistributedDataParallel, *_args: Any, **_kwargs: Any) -> None:
        line = observer.line()
        wrappers.cover_by_ddp(wrapper, line)
        keeps_buffers = not wrapper.broadcast_buffers
        observer.write(
            Wrapped(
                "DistributedDataParallel",
                line,
                finds_unused=wrapper.find_unused_parameters,
                keeps_buffers=keeps_buffers,
                by_library=observer.is_by_library(),
                ranks=tuple(distributed_c10d.get_process_group_ranks(wrapper.process_group)),
            )
        )

    def observe_forward(wrapper: DistributedDataParallel, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        wrappers.note_forward(wrapper)
        yield

    observe_init = observer.while_waiting("init_process_group", note_world)
    make = observer.around("process groups", observe_init)
    replace_everywhere("torch.distributed", distributed_c10d, "init_process_group", make)
    for old in _COLLECTIVES:
        new = _RENAMED.get(old, old)
        name = new if hasattr(distributed_c10d, new) else old
        make = observer.around("collectives", _observing(observer, optimizers, name))
        replace_everywhere("torch.distributed", distributed_c10d, name, make)
    observe_ddp = observer.while_waiting("DistributedDataParallel", note_ddp)
    replace(DistributedDataParallel, "__init__", observer.around("DistributedDataParallel", observe_ddp))
    replace(DistributedDataParallel, "forward", observer.around("DistributedDataParallel", observe_forward))


def _hooks(observer: Observer, wrappers: Wrappers, optimizers: Optimizers) -> dict[str, Callable[[Any], None]]:
    """Return functions that hook modules of torch once these are imported, by the module's name."""

    def observe_join(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        observer.write(Collective(JOIN, "", (), observer.line()))
        yield

    def note_fsdp(wrapper: Any, *_args: Any, **_kwargs: Any) -> None:
        wrappers.shard(wrapper.parameters())
        wrappers.cover(wrapper.parameters(), observer.line())

    def observe_average(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        observer.write(Wrapped("ModelAverager", observer.line(), AVERAGES_WEIGHTS))
        yield

    def observe_parallel(
        _model: Any, device_mesh: Any = None, *_args: Any, **_kwargs: Any
    ) -> Generator[None, Any, None]:
        if device_mesh is None or device_mesh.size() > 1:
            observer.write(Wrapped("parallelize_module", observer.line(), TENSOR_PARALLEL))
        yield

    def hook_functional(module: Any) -> None:
        for kind in _FUNCTIONAL:
            replace(module, kind, around("collectives", _observing(observer, optimizers, kind, by_script=True)))

    around = observer.around
    observe_fsdp = observer.while_waiting("FullyShardedDataParallel", note_fsdp)
    return {
        "torch.distributed._functional_collectives": hook_functional,
        "torch.distributed.algorithms.join": lambda module: replace(
            module.Join, "__init__", around("joins", observe_join)
        ),
        "torch.distributed.fsdp.fully_sharded_data_parallel": lambda module: replace(
            module.FullyShardedDataParallel, "__init__", around("FSDP", observe_fsdp)
        ),
        "torch.distributed.algorithms.model_averaging.averagers": lambda module: replace(
            module.ModelAverager, "__init__", around("averages of weights", observe_average)
        ),
        "torch.distributed.tensor.parallel.api": lambda module: replace_everywhere(
            "torch.distributed", module, "parallelize_module", around("tensor parallelism", observe_parallel)
        ),
    }


def install(observer: Observer) -> None:
    """Hook torch, which has been imported."""
    seed_by_rank()
    wrappers = Wrappers()
    models = pytorch_models.install(observer, wrappers)
    optimizers = pytorch_optimizers.install(observer, models, wrappers)
    pytorch_data.install(observer)
    _hook_distributed(observer, wrappers, optimizers)
    hook_modules(observer, _hooks(observer, wrappers, optimizers))
    installed[:] = [(optimizers, wrappers)]


def seed_by_rank() -> None:
    """Give rank 0 the weights of the run on one rank, unless the script seeds, and other ranks others.

    The rank of a process that torch.multiprocessing.spawn has started is not known yet: it draws its own seed. While it
    imports the script, it has no parent_process() either.
    """
    if multiprocessing.parent_process() is None and "--multiprocessing-fork" not in sys.orig_argv:
        torch.manual_seed(apparent_rank())


installed: list[tuple[Optimizers, Wrappers]] = []
"""Observers of optimizers and wrappers, which those of Horovod need."""
