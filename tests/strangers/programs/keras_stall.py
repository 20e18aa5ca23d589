"""Rank 1 stops in a callback, where no check foresees it; rank 0 waits for its gradients."""

import time

import keras
import numpy as np

import allstep.tensorflow.horovod_keras as hvd

hvd.init()


class Wait(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if hvd.rank() == 1 and batch == 1:
            time.sleep(600)


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
data = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
model.fit(*data, 2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Wait()])
