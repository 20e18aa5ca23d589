"""Observe Keras 3 on TensorFlow: its fit, models and optimizers, each by a separate file."""

from __future__ import annotations

from keras import backend

from allstep.commands.prove.observer.observer import Observer


def install(observer: Observer) -> None:
    """Hook keras, which has been imported, if its backend is TensorFlow."""
    if backend.backend() != "tensorflow":
        return
    from allstep.commands.prove.observer import keras_fit, keras_gradients, keras_models, keras_values

    keras_values.install(observer)
    keras_models.install(observer)
    keras_gradients.install(observer)
    keras_fit.install(observer)
