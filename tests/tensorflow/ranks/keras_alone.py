"""Test on a single rank: a plain optimizer trains with each callback, and a loaded one that had local variables trains.

Usage: python keras_alone.py DIRECTORY.
"""

from keras import models, optimizers
from keras_cases import DIRECTORY, compiled, error, fit

import allstep.tensorflow.horovod_keras as hvd

hvd.init()
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(0.1, 1),
    hvd.callbacks.BestModelCheckpoint("loss", filepath=str(DIRECTORY / "best.keras")),
]
fit(compiled(optimizers.SGD(0.1)), *callbacks, epochs=2)
model = compiled(None)
assert "expected a model with an optimizer" in error(fit, model, callbacks[0])

model = compiled(optimizers.SGD(0.1))
optimizer = hvd.PartialDistributedOptimizer(optimizers.SGD(0.1), local_layers=model.layers[0])
model.compile(optimizer, model.loss)
model.save(DIRECTORY / "local.keras")
hvd.shutdown()
fit(models.load_model(DIRECTORY / "local.keras"), seed=0)
