"""Horovod's elastic example for Keras with less data and a killed rank, for test_horovod_elastic.py.

Usage: horovodrun --min-np 1 ... python keras_elastic.py DIRECTORY. Rank 1 kills itself once, in its second epoch. The
job ends after the next epoch that two ranks have trained. Each rank prints its events as lines of JSON.
"""

import json
import os
import signal
import sys
import zlib
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import allstep.tensorflow.horovod_keras as hvd

KILLED = Path(sys.argv[1]) / "killed"
hvd.init()
random = np.random.default_rng(0)
images, labels = random.random((640, 8, 8, 1), np.float32), random.integers(0, 10, 640)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(640).batch(16)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")])
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.Adam(0.001 * hvd.size()), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, experimental_run_tf_function=False
)
model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def say(event: str) -> None:
    values = b"".join(variable.numpy().tobytes() for variable in [*model.variables, *optimizer.variables])
    where = {"rank": hvd.rank(), "size": hvd.size(), "epoch": state.epoch, "batch": state.batch}
    # Both ranks write to the same pipe, so write the line in one piece.
    sys.stdout.write(json.dumps({"event": event, **where, "state": zlib.crc32(values)}) + "\n")
    sys.stdout.flush()


def on_state_reset() -> None:
    tf.keras.backend.set_value(state.model.optimizer.lr, 0.001 * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, verbose=0)


class KillsOnce(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if hvd.rank() == 1 and state.epoch == 1 and batch == 7 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        say("epoch")
        if KILLED.exists() and hvd.size() == 2:
            self.model.stop_training = True


@hvd.elastic.run
def train(state):
    say("begin")
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        KillsOnce(),  # prints the epoch before its commit, which may interrupt training
        hvd.elastic.CommitStateCallback(state),
    ]
    state.model.fit(dataset, steps_per_epoch=20, epochs=1000 - state.epoch, callbacks=callbacks, verbose=0)


state.register_reset_callbacks([on_state_reset])
train(state)
say("end")
