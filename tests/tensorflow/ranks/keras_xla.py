"""Cases of `model.fit` with jit_compile=True: XLA compiles gradients and update, with Horovod between them."""

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers
from keras_cases import DIRECTORY, case, error, fit, network, samples, values

import allstep.tensorflow.horovod_keras as hvd
from allstep.tensorflow.compat import is_in_xla

INSIDE: list[bool] = []
NUM_SAMPLES = 20  # in batches of 8: the last one has 4


@keras.saving.register_keras_serializable("test")
class Looks(keras.layers.Layer):
    """Records, when a training step is traced, whether XLA compiles it."""

    def call(self, inputs, training=False):
        if training and not tf.executing_eagerly():
            INSIDE.append(is_in_xla())
        return inputs


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def ready(model: keras.Model, **options) -> keras.Model:
    optimizer = hvd.DistributedOptimizer(optimizers.Adam(0.01))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"], **options)
    return model


def history(model: keras.Model) -> list:
    """Return losses and accuracies of three epochs, with sample weights of 0 to 2."""
    INSIDE.clear()
    x, y = (array[:NUM_SAMPLES] for array in samples(seed=hvd.rank()))
    weights = np.arange(NUM_SAMPLES) % 3
    average = hvd.callbacks.MetricAverageCallback()
    logs = model.fit(x, y, 8, 3, 0, [average], sample_weight=weights, shuffle=False).history
    return [logs["loss"], logs["accuracy"]]


@case
def fit_by_xla():
    found: dict[str, dict] = {"history": {}, "weights": {}, "is_inside": {}}

    def train(name: str, model: keras.Model) -> None:
        found["history"][name] = history(model)
        found["weights"][name] = values(model.weights)
        found["is_inside"][name] = sorted(set(INSIDE))

    def looking() -> keras.Model:
        plain = network()
        return keras.Sequential([keras.Input((4,)), plain.layers[0], Looks(), plain.layers[1]])

    path = DIRECTORY / f"xla{hvd.rank()}.keras"
    ready(looking(), jit_compile=True, steps_per_execution=2).save(path)
    train("without", ready(looking(), jit_compile=False))
    train("with", ready(looking(), jit_compile=True, steps_per_execution=2))
    train("loaded", hvd.load_model(path))
    train("eagerly", ready(looking(), jit_compile=True, run_eagerly=True))
    return found


@case
def xla_of_a_whole_step():
    return error(fit, ready(OwnStep([keras.Input((4,)), keras.layers.Dense(3)]), jit_compile=True))


@case
def xla_where_keras_chooses():
    class OnGPU(keras.Sequential):
        """Model for which Keras chooses XLA."""

        def _resolve_auto_jit_compile(self):
            return True

    class OwnStepOnGPU(OnGPU, OwnStep):
        pass

    return [ready(kind([keras.layers.Dense(3)])).jit_compile for kind in (OnGPU, OwnStepOnGPU)]
