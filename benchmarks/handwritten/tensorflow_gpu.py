"""Reference for the trainer on a GPU in TensorFlow: a loop written for speed, on images that are on the device.

It uses a mixed policy, tf.function or XLA, and Keras' own ResNet-50 and optimizer, without ranks and checks. float32 is
IEEE's, as in the trainer. Networks that Keras does not have are the trainer's.
"""

import os
from collections.abc import Sequence

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, block_arguments, time_blocks
from allstep.tensorflow.models import build_model


def main(argv: Sequence[str] | None = None) -> None:
    flags = block_arguments(argv)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    gpus = tf.config.list_physical_devices("GPU") if flags.device == "cuda" else []
    tf.config.set_visible_devices(gpus[:1], "GPU")
    for gpu in gpus[:1]:
        tf.config.experimental.set_memory_growth(gpu, True)  # the other job needs some as well

    shape, size, num_classes = tuple(flags.synthetic_shape), flags.batch_size, flags.synthetic_classes
    keras.config.set_dtype_policy("mixed_bfloat16" if flags.precision == "bf16" else "float32")
    if flags.model == "resnet50":
        model = keras.applications.ResNet50(
            weights=None,  # pyright: ignore[reportArgumentType] (Keras takes None, here and below)
            input_shape=shape,
            classes=num_classes,
            classifier_activation=None,  # pyright: ignore[reportArgumentType]
        )
    else:
        model = build_model(flags.model, shape, num_classes, precision=flags.precision)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    optimizer.build(model.trainable_variables)
    images = tf.cast(tf.random.uniform((size, *shape), 0, 256, tf.int32), tf.uint8)
    labels = tf.random.uniform((size,), 0, num_classes, tf.int64)

    @tf.function(jit_compile=flags.compile)
    def train_step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(tf.cast(images, tf.float32) / 127.5 - 1, training=True), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    weight = model.trainable_variables[0]
    time_blocks(flags, train_step, weight.numpy)


if __name__ == "__main__":
    main()
