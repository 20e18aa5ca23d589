"""Writes a trained network in Keras' and TensorFlow's formats and ONNX; `pytorch/exporting.py` writes PyTorch's."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.tensorflow.loaded import LoadedNetwork
from allstep.tensorflow.networks.batch_norm import BatchNorm

_OPSET = 18


def write(form: str, path: Path, network: LoadedNetwork, dataset: Dataset, *, scales: bool) -> None:
    """Write a network, or raise the exporter's exception for those that it cannot export.

    `form` is keras, saved-model or onnx; `scales` tells whether the graph takes samples as they are in the data set.
    """
    are_numbers = dataset.input_type != "int64"
    kind = dataset.input_type if scales or not are_numbers else "float32"
    if form == "keras":
        model = _of_keras_alone(network.model)
        if scales:
            inputs = keras.Input(dataset.input_shape, dtype=kind)
            model = keras.Model(inputs, model(_rescaling(dataset)(inputs)))
        model.save(path)
        return
    rescale = network.normalise if scales else lambda samples: samples
    signature = [tf.TensorSpec((None, *dataset.input_shape), kind, name="input")]

    @tf.function(input_signature=signature, autograph=False)
    def serve(samples: tf.Tensor) -> tf.Tensor:
        return tf.identity(network.model(rescale(samples), training=False), name="logits")

    if form == "saved-model":
        module = tf.Module()
        module.model, module.serve = network.model, serve  # pyright: ignore[reportAttributeAccessIssue]
        tf.saved_model.save(module, str(path), signatures={"serving_default": serve})
        return
    import tf2onnx  # pyright: ignore[reportMissingImports] (an extra)

    with contextlib.redirect_stdout(io.StringIO()):
        tf2onnx.convert.from_function(serve, input_signature=signature, opset=_OPSET, output_path=str(path))


def _rescaling(dataset: Dataset) -> keras.layers.Layer:
    """Return a layer of Keras' own that normalises samples."""
    mean, std = np.array(dataset.mean), np.array(dataset.std)
    scale = 1 / ((255 if dataset.input_type == "uint8" else 1) * std)
    return keras.layers.Rescaling(scale.tolist(), (-mean / std).tolist(), dtype="float32")


def _of_keras_alone(model: keras.Model) -> keras.Model:
    """Return a model without layers of allstep, which only a program with allstep could load.

    Raises UserError if a layer has no counterpart in Keras.
    """
    own = [layer for layer in model.layers if type(layer).__module__.startswith("allstep.")]
    if not own:
        return model
    for layer in own:
        if not isinstance(layer, BatchNorm):
            raise UserError(f"its layer {type(layer).__name__} is not one of Keras; export it --to saved-model or onnx")

    def counterpart(layer: keras.layers.Layer) -> keras.layers.Layer:
        if not isinstance(layer, BatchNorm):
            return type(layer).from_config(layer.get_config())
        return keras.layers.BatchNormalization(momentum=1 - layer.MOMENTUM, epsilon=layer.EPSILON, name=layer.name)

    copied = keras.models.clone_model(model, clone_function=counterpart)
    for layer, copy in zip(model.layers, copied.layers, strict=True):
        copy.set_weights(layer.get_weights())
    return copied
