"""Observe Horovod for PyTorch, at the functions that all its other ones call (as of Horovod 0.28.1)."""

from collections.abc import Generator
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as wrapper_classes

from allstep.commands.prove.observer import pytorch
from allstep.commands.prove.observer.guarding import Observation
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_optimizers import IS_PARTIAL
from allstep.commands.prove.records import JOIN, Collective, Restored, World, Wrapped

_ASYNCHRONOUS = (
    "_allgather_async",
    "_allreduce_async",
    "_broadcast_async",
    "_grouped_allgather_async",
    "_grouped_allreduce_async",
)
_BLOCKING = ("barrier", JOIN, "synchronize")
_IN_PLACE = ("add_", "clamp_", "clamp_max_", "clamp_min_", "clip_", "copy_", "div_", "mul_", "nan_to_num_", "sub_")
"""Methods by which scripts change gradients."""


def install(observer: Observer) -> None:
    """Hook horovod.torch, which has been imported."""
    [(optimizers, wrappers)] = pytorch.installed

    def note_world(*_args: Any, **_kwargs: Any) -> None:
        observer.write(World("horovod", hvd.rank(), hvd.size(), observer.line()))

    def observe_collective(kind: str) -> Observation:
        def observe(tensor: Any, _output: Any, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
            if "allreduce" in kind and not observer.is_inside:
                for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
                    optimizers.gradients.note_sent(one)
            name = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), "")
            shape = tuple(getattr(tensor, "shape", ()))
            observer.collectives[kind] += 1
            operation = operations.get(args[1], "") if "allreduce" in kind else ""
            short = kind.strip("_").removesuffix("_async")
            observer.write(Collective(short, name, shape, observer.line(), operation, observer.callers()))
            yield

        return observe

    def observe_optimizer(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        wrapped = yield
        line = observer.line()
        operation = operations.get(getattr(wrapped, "op", hvd.Adasum), "adasum")  # Adasum's wrapper has no op
        wrappers.cover((one for group in wrapped.param_groups for one in group["params"]), line)
        process_set = getattr(wrapped, "process_set", hvd.global_process_set)  # Adasum's wrapper has none
        observer.write(Wrapped("hvd.DistributedOptimizer", line, operation, ranks=tuple(process_set.ranks or ())))

    def observe_partial_step(optimizer: Any, _parameter: Any) -> Generator[None, Any, None]:
        """Mark the steps in which Adasum's wrapper updates a single weight, to reduce the change of that weight."""
        vars(optimizer)[IS_PARTIAL] = True
        try:
            yield
        finally:
            vars(optimizer)[IS_PARTIAL] = False

    def observe_in_place(tensor: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        if isinstance(tensor, torch.Tensor):
            optimizers.before_inplace(tensor)
        yield

    def observe_state(state: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        yield
        observer.write(Restored(tuple(type(one).__name__ for one in state._handlers.values()), observer.line()))

    operations = {hvd.Average: "average", hvd.Sum: "sum", hvd.Adasum: "adasum"}
    around = observer.around
    observe_init = observer.while_waiting("hvd.init", note_world)
    replace_everywhere("horovod.torch", mpi_ops, "init", around("hvd.init", observe_init))
    replace_everywhere("horovod.torch", hvd, "DistributedOptimizer", around("hvd's optimizers", observe_optimizer))
    partial = around("Adasum", observe_partial_step)
    replace(wrapper_classes._DistributedAdasumOptimizer, "_allreduce_grad_async", partial)
    replace(hvd.elastic.TorchState, "__init__", around("elastic states", observe_state))
    for name in _ASYNCHRONOUS:
        replace(mpi_ops, name, around("Horovod's collectives", observe_collective(name)))
    for name in _BLOCKING:
        make = around("Horovod's collectives", observer.while_waiting(f"hvd.{name}"))
        replace_everywhere("horovod.torch", mpi_ops, name, make)
    for name in _IN_PLACE:
        replace(torch.Tensor, name, around("changes of gradients", observe_in_place))
