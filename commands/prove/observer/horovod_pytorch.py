"""Observes Horovod for PyTorch, at the functions on which all others of it stand: looked up in Horovod 0.28.1."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd
from horovod.torch import mpi_ops
from horovod.torch import optimizer as wrappers

from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_optimizers import IS_PARTIAL
from allstep.commands.prove.records import Collective, World, Wrapped

_ASYNCHRONOUS = (
    "_allgather_async",
    "_allreduce_async",
    "_broadcast_async",
    "_grouped_allgather_async",
    "_grouped_allreduce_async",
)
_BLOCKING = ("barrier", "join", "synchronize")


def install(observer: Observer) -> None:
    """Hook horovod.torch, which has been imported."""

    def wrap_init(init: Any) -> Any:
        @functools.wraps(init)
        def observed(*args: Any, **kwargs: Any) -> None:
            with observer.waiting("hvd.init"):
                init(*args, **kwargs)
            observer.write(World("horovod", hvd.rank(), hvd.size(), observer.line()))

        return observed

    def wrap_collective(kind: str, call: Any) -> Any:
        @functools.wraps(call)
        def observed(tensor: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
            name = next((value for value in (*args, *kwargs.values()) if isinstance(value, str)), "")
            shape = tuple(tensor.shape) if hasattr(tensor, "shape") else ()
            operation = operations.get(args[1], "") if "allreduce" in kind else ""
            observer.write(Collective(kind.strip("_").removesuffix("_async"), name, shape, observer.line(), operation))
            return call(tensor, output, *args, **kwargs)

        return observed

    def wrap_blocking(kind: str, call: Any) -> Any:
        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> Any:
            with observer.waiting(f"hvd.{kind}"):
                return call(*args, **kwargs)

        return observed

    def wrap_optimizer(make: Any) -> Any:
        @functools.wraps(make)
        def observed(*args: Any, **kwargs: Any) -> Any:
            wrapped = make(*args, **kwargs)
            operation = operations.get(getattr(wrapped, "op", hvd.Adasum), "adasum")  # Adasum's wrapper has no op
            observer.write(Wrapped("hvd.DistributedOptimizer", observer.line(), operation))
            return wrapped

        return observed

    def wrap_partial_step(step: Any) -> Any:
        """Adasum's wrapper steps each weight by itself, when its gradient is there, and reduces what has changed."""

        @functools.wraps(step)
        def observed(optimizer: Any, parameter: Any) -> Any:
            vars(optimizer)[IS_PARTIAL] = True
            try:
                return step(optimizer, parameter)
            finally:
                vars(optimizer)[IS_PARTIAL] = False

        return observed

    operations = {hvd.Average: "average", hvd.Sum: "sum", hvd.Adasum: "adasum"}
    replace_everywhere("horovod.torch", mpi_ops, "init", wrap_init)
    replace_everywhere("horovod.torch", hvd, "DistributedOptimizer", wrap_optimizer)
    replace(wrappers._DistributedAdasumOptimizer, "_allreduce_grad_async", wrap_partial_step)
    for name in _ASYNCHRONOUS:
        replace(mpi_ops, name, functools.partial(wrap_collective, name))
    for name in _BLOCKING:
        replace_everywhere("horovod.torch", mpi_ops, name, functools.partial(wrap_blocking, name))
