"""A trained network outside of a run, for `allstep.load` and `allstep export`; `pytorch/loaded.py` has the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from allstep.tensorflow.numerics import wrong_keras  # noqa: E402


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
        policy = keras.config.dtype_policy()
        with tf.device(self.device):
            self.model = build_network(config, dataset, own)
        keras.config.set_dtype_policy(policy)
        self.normalise = Inputs(dataset)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by their names in checkpoints."""
        return {f"model/{weight.name}": weight.canonical_shape for weight in canonical_weights(self.model)}

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
