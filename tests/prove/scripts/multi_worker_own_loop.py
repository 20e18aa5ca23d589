"""A custom training loop under MultiWorkerMirroredStrategy, in the shape of TensorFlow's tutorial."""

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
size = strategy.num_replicas_in_sync
batch_size = 16 * size

generator = np.random.default_rng(0)
inputs = generator.normal(size=(512, 16)).astype("float32")
labels = inputs[:, :4].argmax(1)


def dataset_of(context):
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(512, seed=1).batch(context.get_per_replica_batch_size(batch_size)).repeat()


train = strategy.distribute_datasets_from_function(dataset_of)
with strategy.scope():
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)])
    optimizer = keras.optimizers.SGD(0.05 * size)
    loss_of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def train_step(images, targets):
    with tf.GradientTape() as tape:
        losses = loss_of_each(targets, model(images, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=batch_size)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


@tf.function
def train_all(images, targets):
    return strategy.reduce("SUM", strategy.run(train_step, args=(images, targets)), axis=None)


for _, (images, targets) in zip(range(40), train, strict=False):
    loss = train_all(images, targets)
