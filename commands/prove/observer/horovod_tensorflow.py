"""Observe Horovod for TensorFlow, at the functions that all its other ones call (as of Horovod 0.28.1).

Calls during the tracing of a graph are part of the step and are not recorded, except that Adasum is noted. Of tapes and
of the drop-in's optimizers (`tensorflow/drop_in/optimizer.py`), the ranks that train together are recorded.
"""

from collections.abc import Generator
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from allstep.commands.prove.observer.guarding import Observation
from allstep.commands.prove.observer.keras_models import native
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.tf_distribute import local, sent
from allstep.commands.prove.records import JOIN, Collective, World, Wrapped

_COLLECTIVES = ("_allreduce", "_grouped_allreduce", "allgather", "broadcast", "broadcast_", JOIN)


def install(observer: Observer) -> None:
    """Hook horovod.tensorflow, which has been imported."""

    def note_world(*_args: Any, **_kwargs: Any) -> None:
        observer.write(World("horovod.tensorflow", hvd.rank(), hvd.size(), observer.line()))

    def observe_collective(kind: str) -> Observation:
        def observe(*args: Any, **kwargs: Any) -> Generator[None, Any, None]:
            line = observer.line()
            if "allreduce" in kind and args:
                sent.extend(args[0] if isinstance(args[0], (list, tuple)) else [args[0]])
            operation = "adasum" if kwargs.get("op") == hvd.Adasum else ""
            if operation and not tf.executing_eagerly():
                observer.write(Wrapped("Adasum in a graph", line, operation))
            if not tf.executing_eagerly() or observer.is_inside or not line:
                yield
                return
            shape = tuple(getattr(args[0], "shape", ())) if args else ()
            name, short = kwargs.get("name") or "", kind.strip("_")
            observer.write(Collective(short, name, shape, line, operation, observer.callers()))
            with observer.waiting(f"hvd.{short}"):
                yield

        return observe

    def observe_tape(*_args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        yield
        _note_ranks(observer, "hvd.DistributedGradientTape", kwargs.get("process_set", hvd.global_process_set))

    observe_init = observer.while_waiting("hvd.init", note_world)
    replace_everywhere("horovod", mpi_ops, "init", observer.around("hvd.init", observe_init))
    for name in _COLLECTIVES:
        make = observer.around("Horovod's collectives", observe_collective(name))
        replace_everywhere("horovod", mpi_ops, name, make)
    replace(hvd, "DistributedGradientTape", observer.around("Horovod's tapes", observe_tape))
    make = observer.around("local variables", _observe_local(observer))
    replace(hvd._DistributedGradientTape, "register_local_source", make)


def install_optimizer(observer: Observer, optimizers: Any) -> None:
    """Hook the module of the drop-in's optimizer, which has been imported."""

    def observe(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        wrapped = yield
        _note_ranks(observer, "hvd.DistributedOptimizer", wrapped._reduction.process_set)

    make = observer.around("Horovod's optimizers", observe)
    replace_everywhere("allstep", optimizers, "DistributedOptimizer", make)
    make = observer.around("local variables", _observe_local(observer))
    replace(optimizers.Distributed, "register_local_var", make)


def _observe_local(observer: Observer) -> Observation:
    def observe(_owner: Any, variable: Any) -> Generator[None, Any, None]:
        yield
        local.add(id(native(variable)))
        observer.note_unseen("local variables of Horovod", "each rank trains its own")

    return observe


def _note_ranks(observer: Observer, kind: str, process_set: hvd.ProcessSet) -> None:
    """Record the ranks of a process set, if it is not that of all."""
    if process_set.ranks:
        observer.write(Wrapped(kind, observer.line(), ranks=tuple(process_set.ranks)))
