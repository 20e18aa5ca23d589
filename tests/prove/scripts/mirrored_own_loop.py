"""A custom training loop under MirroredStrategy, in the shape of TensorFlow's tutorial."""

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
size = strategy.num_replicas_in_sync
batch_size = 16 * size

generator = np.random.default_rng(0)
inputs = generator.normal(size=(768, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)
train = tf.data.Dataset.from_tensor_slices((inputs[:512], labels[:512])).shuffle(512).batch(batch_size)
test = tf.data.Dataset.from_tensor_slices((inputs[512:], labels[512:])).batch(batch_size)
train, test = strategy.experimental_distribute_dataset(train), strategy.experimental_distribute_dataset(test)

with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.05 * size)
    loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def train_step(images, targets):
    with tf.GradientTape() as tape:
        losses = loss_of_each(targets, model(images, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=batch_size)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def test_step(images, targets):
    return tf.reduce_sum(tf.cast(tf.argmax(model(images, training=False), 1) == targets, tf.float32))


@tf.function
def train_all(images, targets):
    return strategy.reduce("SUM", strategy.run(train_step, args=(images, targets)), axis=None)


@tf.function
def test_all(images, targets):
    return strategy.reduce("SUM", strategy.run(test_step, args=(images, targets)), axis=None)


for epoch in range(2):
    for images, targets in train:
        loss = train_all(images, targets)
    correct = sum(float(test_all(images, targets)) for images, targets in test)
    print(f"epoch {epoch}: loss {float(loss):.3f}, accuracy {correct / 256:.3f}")
