"""Reference for the trainer in TensorFlow: a custom loop of Keras 3 layers, over tensors in memory.

    horovodrun -np 2 python -m allstep.benchmarks.handwritten.tensorflow_horovod result.json \\
        --num-samples 3840 --batch-size 64 --epochs 3

The optimizer is TensorFlow's fused kernel of momentum, as in the trainer: Keras' SGD computes something else.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, epoch_in_memory, write
from allstep.common.recipe.weights import initial_weights
from allstep.tensorflow.models import build_model, export_weights, import_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the result on rank 0."""
    flags = arguments(argv)
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    model = build_model("cnn", (28, 28, 1), 10)
    import_weights(model, initial_weights({name: w.shape for name, w in export_weights(model).items()}, 0))
    variables = [variable.value for variable in model.trainable_variables]
    velocities = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
    hvd.broadcast_variables(variables, root_rank=0)

    def compute(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, Any]:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        return loss, tape.gradient(loss, variables)

    def apply(gradients: Any) -> None:
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=velocity.handle, lr=LEARNING_RATE, grad=gradient, momentum=MOMENTUM
            )

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = compute(images, labels)
        apply(hvd.grouped_allreduce(gradients))
        return loss

    rates, losses = [], []
    for epoch in range(flags.epochs):
        arrays = epoch_in_memory(flags, epoch, rank=hvd.rank(), world_size=hvd.size())
        images, labels = map(tf.constant, arrays)
        hvd.allreduce(tf.zeros(1))
        started = time.perf_counter()
        for start in range(0, len(labels), flags.batch_size):
            end = start + flags.batch_size
            losses.append(train_step(images[start:end], labels[start:end]))
        losses[-1].numpy()
        seconds = tf.constant(time.perf_counter() - started, tf.float64)
        slowest = np.asarray(hvd.allreduce(seconds, op=hvd.Max)).item()
        rates.append(flags.num_samples / slowest)
    losses = np.asarray(hvd.allreduce(tf.stack(losses))).tolist()
    if hvd.rank() == 0:
        write(flags.output, images_per_second=rates, losses=losses)


if __name__ == "__main__":
    main()
