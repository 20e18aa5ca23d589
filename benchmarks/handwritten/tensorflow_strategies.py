"""What a user would write by hand for each strategy of TensorFlow: Keras 3 in a custom loop, data in memory.

    python -m allstep.benchmarks.handwritten.tensorflow_strategies mirrored result.json --num-devices 2 \\
        --num-samples 3840 --batch-size 128 --epochs 3

`multi-worker-mirrored` and `parameter-server` find their places in TF_CONFIG, as TensorFlow's guides have it; a chief
keeps the parameters itself. The batch size is that of a process, over all its devices.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, epoch_in_memory, write
from allstep.common.base.memory import keep_freed_memory
from allstep.common.recipe.weights import initial_weights
from allstep.tensorflow.models import build_model, export_weights, import_weights

STRATEGIES = ("single", "mirrored", "central-storage", "multi-worker-mirrored", "parameter-server")


def make_strategy(name: str, num_devices: int) -> tf.distribute.Strategy:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # MultiWorkerMirroredStrategy's own all-reduces are faster with a thread beside the one that computes: 1,857
    # images/s, where they made 1,605 on the same thread.
    tf.config.threading.set_inter_op_parallelism_threads(2 if name == "multi-worker-mirrored" else num_devices)
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
    devices = [f"/CPU:{number}" for number in range(num_devices)]
    if name == "single":
        return tf.distribute.OneDeviceStrategy(devices[0])
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central-storage":
        return tf.distribute.experimental.CentralStorageStrategy(devices, parameter_device=devices[0])
    if name == "multi-worker-mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.ParameterServerStrategy(resolver)


def serve(role: str, index: int) -> tf.distribute.Server:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    return tf.distribute.Server(resolver.cluster_spec(), job_name=role, task_index=index, protocol="grpc")


def serve_until(done: Path, index: int) -> None:
    """What a worker does until the chief has written `done`: a server has no end of its own."""
    _server = serve("worker", index)
    while not done.exists():
        time.sleep(0.1)
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and let rank 0 write the result."""
    flags = arguments(argv, strategies=STRATEGIES)
    keep_freed_memory()  # as in the trainers: it is not the C library's allocator that is compared
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
    is_asynchronous = flags.strategy == "parameter-server"
    if is_asynchronous and task["type"] == "worker":
        serve_until(flags.output, task["index"])
    server = serve("ps", 0) if is_asynchronous else None
    strategy = make_strategy(flags.strategy, flags.num_devices)
    in_cluster = flags.strategy == "multi-worker-mirrored"
    rank, world_size = (task["index"], strategy.num_replicas_in_sync) if in_cluster else (0, 1)

    with strategy.scope():
        model = build_model("cnn", (28, 28, 1), 10)
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        optimizer.build(model.trainable_variables)
    import_weights(model, initial_weights({name: w.shape for name, w in export_weights(model).items()}, 0))
    global_batch_size = flags.batch_size * world_size

    def compute(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch_size)
        return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    if flags.compile:
        compute = tf.function(compute, jit_compile=True)

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = compute(images, labels)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(iterator) -> tf.Tensor:
        loss = strategy.run(replica_step, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy) if server else None

    def distributed(images: np.ndarray, labels: np.ndarray):
        def in_order(_=None) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices((images, labels)).batch(flags.batch_size).prefetch(2)

        if coordinator:
            return iter(coordinator.create_per_worker_dataset(lambda: in_order().repeat()))
        if in_cluster:
            return iter(strategy.distribute_datasets_from_function(in_order))
        return iter(strategy.experimental_distribute_dataset(in_order()))

    rates, losses = [], []
    for epoch in range(flags.epochs):
        images, labels = epoch_in_memory(
            flags.num_samples, epoch, batch_size=flags.batch_size, rank=rank, world_size=world_size
        )
        iterator = distributed(images, labels)
        started = time.perf_counter()
        epoch_losses = []
        for _ in range(0, len(labels), flags.batch_size):
            scheduled = coordinator.schedule(train_step, args=(iterator,)) if coordinator else train_step(iterator)
            epoch_losses.append(scheduled)
        if coordinator:
            coordinator.join()
            epoch_losses = [value.fetch() for value in epoch_losses]
        losses += [float(loss) for loss in epoch_losses]
        rates.append(flags.num_samples / (time.perf_counter() - started))
    if rank == 0:
        write(flags.output, images_per_second=rates, losses=losses)


if __name__ == "__main__":
    main()
