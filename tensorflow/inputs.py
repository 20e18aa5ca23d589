"""Inputs of a step: normalised samples. `pytorch/inputs.py` has the same."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from allstep.common.data.datasets import Dataset

Samples = tuple[tf.TensorSpec, tf.TensorSpec]
"""Shapes and types of inputs and targets, for any number of samples."""


class Inputs:
    """Normalises samples by the data set's mean and deviation."""

    def __init__(self, dataset: Dataset) -> None:
        mean, std = np.array(dataset.mean, np.float32), np.array(dataset.std, np.float32)
        scale, shift = 1 / (255 * std), -mean / std
        self._normalise: Callable[[tf.Tensor], tf.Tensor] = (
            (lambda inputs: inputs * scale + shift)
            if dataset.input_type == "uint8"
            # A mean may be many times the deviation; a scaled shift would lose its digits.
            else (lambda inputs: (inputs - mean) * (1 / std))
        )
        inputs = tf.TensorSpec((None, *dataset.input_shape), dataset.input_type)
        targets = tf.TensorSpec((None, *dataset.target_shape), dataset.target_type)
        shares = tf.TensorSpec((None, dataset.num_classes), "float32")
        self.in_training: Samples = (inputs, shares if dataset.mixes_targets else targets)
        self.in_validation: Samples = (inputs, targets)

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return normalised inputs, or tokens unchanged; called in a compiled step."""
        return inputs if inputs.dtype == tf.int64 else self._normalise(tf.cast(inputs, tf.float32))
