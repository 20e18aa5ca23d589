"""A custom loop with GradientTape under Horovod, in the shape of its example for TensorFlow 2 and MNIST."""

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
size, rank = hvd.size(), hvd.rank()

generator = np.random.default_rng(0)
inputs = generator.normal(size=(768, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)
train = tf.data.Dataset.from_tensor_slices((inputs[:512], labels[:512]))
train = train.shard(size, rank).shuffle(512).batch(16, drop_remainder=True)
test = tf.data.Dataset.from_tensor_slices((inputs[512:], labels[512:])).shard(size, rank).batch(64)

model = keras.Sequential(
    [keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.SGD(0.05 * size, momentum=0.9)


@tf.function
def train_step(images, targets):
    with tf.GradientTape() as tape:
        loss = cross_entropy(targets, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


is_first = True
for epoch in range(2):
    for images, targets in train.take(8):
        train_step(images, targets)
        if is_first:
            hvd.broadcast_variables([variable.value for variable in model.weights], root_rank=0)
            hvd.broadcast_variables([variable.value for variable in optimizer.variables], root_rank=0)
        is_first = False
    correct = sum(float(tf.reduce_sum(tf.cast(tf.argmax(model(x), 1) == y, tf.float32))) for x, y in test)
    accuracy = hvd.allreduce(tf.constant(correct / 256), op=hvd.Sum, name="accuracy")
    if rank == 0:
        print(f"epoch {epoch}: accuracy {float(accuracy):.3f}")

if rank == 0:
    model.save_weights("horovod_tape.weights.h5")
if rank == 0:
    tf.train.Checkpoint(model=model).save("horovod_tape/model")
