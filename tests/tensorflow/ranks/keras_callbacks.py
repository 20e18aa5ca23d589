"""Cases for Horovod's callbacks except the broadcast: metrics, learning rates, the best model."""

import keras
import numpy as np
from keras import optimizers
from keras_cases import DIRECTORY, case, compiled, error, fit, samples

import allstep.tensorflow.horovod_keras as hvd


class Record(keras.callbacks.Callback):
    """Records learning rates and logs as a callback after Horovod's sees them."""

    def __init__(self):
        super().__init__()
        self.logs, self.rates = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


@case
def metric_average():
    before, after = Record(), Record()
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1)), metrics=["accuracy"])
    history = fit(model, before, hvd.callbacks.MetricAverageCallback(), after, validation_data=samples(seed=hvd.rank()))
    return {
        "before": before.logs,
        "after": after.logs,
        "history": {name: values[0] for name, values in history.history.items()},
    }


@case
def warmup():
    record = Record()
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.4)))
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1)
    history = fit(model, warm, record, epochs=3, batch_size=8)
    return {"rates": record.rates, "lr": history.history["lr"]}


@case
def schedule():
    staircase, smooth, late = Record(), Record(), Record()
    callback = hvd.callbacks.LearningRateScheduleCallback
    fit(compiled(hvd.DistributedOptimizer(optimizers.SGD(1.0))), callback(1.0, 0.5), staircase, epochs=2)
    smoothly = callback(1.0, lambda epoch: 1.0 + epoch, staircase=False)
    fit(compiled(hvd.DistributedOptimizer(optimizers.Adam(1.0))), smoothly, smooth, batch_size=8)
    lately = callback(1.0, lambda epoch: 0.1, start_epoch=1, end_epoch=2)
    fit(compiled(hvd.DistributedOptimizer(optimizers.SGD(1.0))), lately, late, epochs=2)
    unknown = callback(1.0, 0.5, staircase=False)
    unknown.set_params({"steps": None})
    return {
        "staircase": staircase.rates[::2],
        "smooth": smooth.rates,
        "late": late.rates[::2],
        "unknown": error(unknown.on_train_begin),
    }


@case
def momentum_correction():
    """Train with gradient 1, momentum 0.5, and learning rates 1 and then 0.1, with which the velocity shrinks."""
    changes = {}
    for momentum_correction in (True, False):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0, momentum=0.5))
        model.compile(optimizer, loss=lambda y, p: p, run_eagerly=True)
        callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.1, momentum_correction=momentum_correction)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), 1, 2, 0, [callback])
        changes[str(momentum_correction)] = float(layer.kernel.numpy()[0, 0])
    return changes


@case
def best_model_checkpoint():
    path = DIRECTORY / f"best-{hvd.rank()}.keras"
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    model = compiled(hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    refused = error(fit, model, checkpoint)
    checkpoint.filepath = str(path)
    fit(model, hvd.callbacks.MetricAverageCallback(), checkpoint, epochs=2)
    weights = DIRECTORY / f"best-{hvd.rank()}.weights.h5"
    fit(model, hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=True, filepath=str(weights)))
    return {"refused": refused, "written": [path.exists(), weights.exists()]}
