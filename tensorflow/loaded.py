"""Trained networks outside of a run, for `allstep.load` and `allstep export`: loading, and export to other formats.

`pytorch/loaded.py` does the same.
"""

import contextlib
import io
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from allstep.common.base.errors import UserError  # noqa: E402
from allstep.common.config.train_config import TrainConfig  # noqa: E402
from allstep.common.data.datasets import Dataset  # noqa: E402
from allstep.tensorflow.inputs import Inputs  # noqa: E402
from allstep.tensorflow.models import build_network, canonical_weights, import_weights  # noqa: E402
from allstep.tensorflow.networks.batch_norm import BatchNorm  # noqa: E402
from allstep.tensorflow.numerics import wrong_keras  # noqa: E402

_OPSET = 18


class LoadedNetwork:
    """A network on one device, with the normalisation of its samples."""

    def __init__(self, config: TrainConfig, dataset: Dataset, own: Any = None) -> None:
        """Build the network, whose weights `load` sets.

        Raises UserError if the device does not exist, and as `build_network` does.
        """
        if line := wrong_keras():
            raise UserError(line)
        gpus = tf.config.list_logical_devices("GPU")
        if config.device == "cuda" and not gpus:
            raise UserError("device cuda needs a GPU that TensorFlow can use, there is none; give cpu or auto")
        self.device = "/GPU:0" if gpus and config.device != "cpu" else "/CPU:0"
        with tf.device(self.device):
            self.model, _ = build_network(config, dataset, own)
        self.normalise = Inputs(dataset)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by their names in checkpoints."""
        return {
            f"model/{weight.name}": weight.array_shape(is_constant=not weight.variable.trainable)
            for weight in canonical_weights(self.model)
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the weights, which have the names of checkpoints."""
        import_weights(self.model, {name.removeprefix("model/"): array for name, array in arrays.items()})

    def inputs(self, samples: np.ndarray) -> tf.Tensor:
        """Return samples as the network takes them: normalised."""
        with tf.device(self.device):
            return self.normalise(tf.convert_to_tensor(samples))

    def outputs(self, inputs: tf.Tensor) -> np.ndarray:
        """Return the outputs, float32 (n, ...)."""
        with tf.device(self.device):
            return tf.cast(self.model(inputs, training=False), tf.float32).numpy()


def write(form: str, path: Path, network: LoadedNetwork, dataset: Dataset, *, scales: bool) -> None:
    """Write a network in Keras' or TensorFlow's format or ONNX.

    Raises the exporter's exception for a network that it cannot export. `form` is keras, saved-model or onnx; `scales`
    tells whether the graph takes samples as they are in the data set.
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
        # TensorFlow does not find the states of random numbers in Keras' layers.
        variables = [variable.value for variable in network.model.variables]
        module.model, module.serve, module.all = network.model, serve, variables  # pyright: ignore[reportAttributeAccessIssue]
        tf.saved_model.save(module, str(path), signatures={"serving_default": serve})
        return
    import onnx  # pyright: ignore[reportMissingImports] (an extra)
    import tf2onnx  # pyright: ignore[reportMissingImports] (an extra)

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        model, _ = tf2onnx.convert.from_function(
            serve,
            input_signature=signature,
            opset=_OPSET,
            output_path=str(path),
            custom_op_handlers={"Erfc": (_make_erf, [])},
        )
    if lacking := sorted({node.op_type for node in model.graph.node if not onnx.defs.has(node.op_type, node.domain)}):
        raise UserError(f"ONNX has no counterpart of TensorFlow's {', '.join(lacking)}")


def _make_erf(graph: Any, node: Any, *_: object) -> None:
    """Replace a node Erfc, which Keras' gelu uses and ONNX lacks, by 1 - Erf."""
    from tf2onnx.utils import map_onnx_to_numpy_type  # pyright: ignore[reportMissingImports] (an extra)

    node.type = "Erf"
    one = graph.make_const(f"{node.name}/one", np.ones((), map_onnx_to_numpy_type(graph.get_dtype(node.input[0]))))
    inputs = [one.output[0], node.output[0]]
    graph.insert_new_node_on_output("Sub", node.output[0], inputs=inputs, name=f"{node.name}/complement")


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
