"""Observes Horovod for TensorFlow, at the functions on which all others of it stand: looked up in Horovod 0.28.1.

What is called while a graph is traced is a part of the step, and not looked at by itself, but for being Adasum.
"""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from allstep.commands.prove.observer.observer import Observer, replace_everywhere
from allstep.commands.prove.records import Collective, World, Wrapped

_COLLECTIVES = ("_allreduce", "_grouped_allreduce", "allgather", "broadcast", "broadcast_", "join")


def install(observer: Observer) -> None:
    """Hook horovod.tensorflow, which has been imported."""

    def wrap_init(init: Any) -> Any:
        @functools.wraps(init)
        def observed(*args: Any, **kwargs: Any) -> None:
            with observer.waiting("hvd.init"):
                init(*args, **kwargs)
            observer.write(World("horovod.tensorflow", hvd.rank(), hvd.size(), observer.line()))

        return observed

    def wrap_collective(kind: str, call: Any) -> Any:
        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> Any:
            line = observer.line()
            operation = "adasum" if kwargs.get("op") == hvd.Adasum else ""
            if operation and not tf.executing_eagerly():
                observer.write(Wrapped("Adasum in a graph", line, operation))
            if not tf.executing_eagerly() or observer.is_inside or not line:
                return call(*args, **kwargs)
            shape = tuple(getattr(args[0], "shape", ())) if args else ()
            observer.write(Collective(kind.strip("_"), kwargs.get("name") or "", shape, line, operation))
            with observer.waiting(f"hvd.{kind.strip('_')}"):
                return call(*args, **kwargs)

        return observed

    replace_everywhere("horovod", mpi_ops, "init", wrap_init)
    for name in _COLLECTIVES:
        replace_everywhere("horovod", mpi_ops, name, functools.partial(wrap_collective, name))
