"""Plain TensorFlow loop under Horovod with exact sharding, a watchdog and a check of the replicas.

horovodrun -np 2 python examples/own_loop_tensorflow.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import allstep.tensorflow.horovod_keras as hvd
from allstep.tensorflow import check_replicas, shard, watch

hvd.init()
images, labels = load_digits(return_X_y=True)
batches = shard((images / 16, labels), global_batch_size=64)

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
step = 0
with watch() as steps:
    for _ in range(3):
        for inputs, targets in batches:
            steps.begin(step := step + 1)
            with tf.GradientTape() as tape:
                loss = batches.weight * loss_of(targets, model(inputs, training=True))
            gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
            optimizer.apply(gradients, model.trainable_variables)
        check_replicas(model)
if hvd.rank() == 0:
    print(f"{step} steps, the last loss is {float(loss):.3f}")
