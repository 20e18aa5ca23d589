"""Observe tf.distribute: the replicas of a mirrored strategy, which are treated like ranks.

Each replica has its own journal; that of the first replica of a process also has the records of the process.
"""

from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

from allstep.commands.prove.observer.files import note_write
from allstep.commands.prove.observer.guarding import Arguments, Observation
from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.records import World

sent: list[tf.Tensor] = []
"""Tensors that were given to Horovod to be reduced since a tape has computed gradients."""
local: set[int] = set()
"""Identities of variables that Horovod is told not to reduce, since each rank trains its own."""


def install(observer: Observer) -> None:
    """Hook tensorflow, which has been imported, and make a given number of devices visible to the script."""
    if observer.num_devices:
        _show_devices(observer.num_devices)

    def observe_mirrored(
        strategy: Any, devices: Sequence[str] | None = None, *args: Any, **kwargs: Any
    ) -> Generator[Arguments, Any, None]:
        if maximum := observer.num_devices:
            devices = (devices or _all_devices())[:maximum]
        yield (strategy, devices, *args), kwargs
        _write_world(observer, strategy)

    def note_workers(strategy: Any, *_args: Any, **_kwargs: Any) -> None:
        _write_world(observer, strategy)

    seen: set[str] = set()

    def files(*names: str) -> Observation:  # which TensorFlow opens in C++
        def observe(_object: Any, path: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
            for name in names:
                note_write(observer, name.format(path), seen)
            yield

        return observe

    def observe_state(save_dir: str, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        note_write(observer, f"{save_dir}/checkpoint", seen)
        yield

    what, checkpoint = "files written by TensorFlow", files("{}.index", "{}.data-00000-of-00001")
    replace(tf.train.Checkpoint, "_write", observer.around(what, checkpoint))
    replace(checkpoint_management, "update_checkpoint_state_internal", observer.around(what, observe_state))
    replace(tf.saved_model, "save", observer.around(what, files("{}/saved_model.pb")))
    replace(tf.distribute.MirroredStrategy, "__init__", observer.around("strategies", observe_mirrored))
    observe_workers = observer.while_waiting("MultiWorkerMirroredStrategy", note_workers)
    replace(tf.distribute.MultiWorkerMirroredStrategy, "__init__", observer.around("strategies", observe_workers))


def current_replica() -> int:
    """Return the replica of this process that is being traced or run; 0 outside of replicas."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    if context is None:
        return 0
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return int(number or 0) % len(context.strategy.extended.worker_devices)


def _write_world(observer: Observer, strategy: Any) -> None:
    num_local = len(strategy.extended.worker_devices)
    worker = strategy.cluster_resolver.task_id or 0 if strategy.cluster_resolver else 0
    for replica in range(num_local):
        rank = worker * num_local + replica
        world = World("tf.distribute", rank, strategy.num_replicas_in_sync, observer.line())
        observer.write(world, replica)


def _show_devices(number: int) -> None:
    """Make `number` GPUs visible or, without GPUs, split the CPU into as many devices."""
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[:number], "GPU")
        return
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)


def _all_devices() -> list[str]:
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return [f"/{kind}:{number}" for number in range(len(tf.config.list_logical_devices(kind)))]
