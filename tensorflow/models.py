"""The networks. `pytorch/models.py` builds the same ones; layers are named so that weights have canonical names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import numpy as np
from keras import layers

from allstep.common.config.validation import check_image_size
from allstep.tensorflow.resnet import BatchNorm, resnet

# Keras' names; weights are float32 in any case.
_POLICIES = {"float32": "float32", "tf32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def build_model(
    name: str, image_shape: tuple[int, int, int], num_classes: int, *, precision: str = "float32"
) -> keras.Model:
    """A network that maps normalised images, float32 (n, height, width, channels), to logits (n, num_classes).

    Args:
        name: mlp, cnn, resnet18 or resnet50.
        image_shape: height, width, channels.
        precision: in which its layers compute: float32, tf32, bf16 or fp16.

    Raises:
        UserError: the images are too small for the network.
    """
    keras.config.set_dtype_policy(_POLICIES[precision])
    if name.startswith("resnet"):
        return resnet(name, image_shape, num_classes)
    return {"mlp": _mlp, "cnn": _cnn}[name](image_shape, num_classes)


def _mlp(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """Two hidden layers of 128 units."""
    return keras.Sequential(
        [
            layers.Input(image_shape),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="fc1"),
            layers.Dense(128, activation="relu", name="fc2"),
            layers.Dense(num_classes, name="fc3"),
        ]
    )


def _cnn(image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """The convolutional network of the MNIST examples, without dropout; 1.2 million parameters at 28 x 28 x 1."""
    height, width, _ = image_shape
    check_image_size("cnn", height, width)
    return keras.Sequential(
        [
            layers.Input(image_shape),
            layers.Conv2D(32, 3, activation="relu", name="conv1"),
            layers.Conv2D(64, 3, activation="relu", name="conv2"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="fc1"),
            layers.Dense(num_classes, name="fc2"),
        ]
    )


def export_weights(model: keras.Model) -> dict[str, np.ndarray]:
    """All weights as canonical arrays (`common.weights` says which those are)."""
    return {weight.name: weight.to_canonical(weight.variable.value.numpy()) for weight in canonical_weights(model)}


def import_weights(model: keras.Model, arrays: dict[str, np.ndarray]) -> None:
    """Set all weights from canonical arrays."""
    for weight in canonical_weights(model):
        weight.variable.assign(weight.from_canonical(arrays[weight.name]))


@dataclass(frozen=True)
class CanonicalWeight:
    """A Keras variable with its canonical name and the way to its canonical layout."""

    name: str
    variable: keras.Variable
    split: tuple[int, ...]
    """Shape with the axes of a flattened input apart."""
    axes: tuple[int, ...]
    """Order of those axes in the canonical layout."""

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        shape = tuple(self.split[axis] for axis in self.axes)
        return (shape[0], math.prod(shape[1:])) if self._was_flattened else shape

    def to_canonical(self, array: np.ndarray) -> np.ndarray:
        canonical = array.reshape(self.split).transpose(self.axes)
        return np.ascontiguousarray(canonical.reshape(canonical.shape[0], -1) if self._was_flattened else canonical)

    def from_canonical(self, array: np.ndarray) -> np.ndarray:
        canonical_split = tuple(self.split[axis] for axis in self.axes)
        back = np.argsort(self.axes)
        return np.ascontiguousarray(array.reshape(canonical_split).transpose(back)).reshape(self.variable.shape)

    @property
    def _was_flattened(self) -> bool:
        return len(self.split) > len(self.variable.shape)


def canonical_weights(model: keras.Model) -> Iterator[CanonicalWeight]:
    """The model's variables, layer by layer, with canonical names and layouts."""
    flattened: tuple[int, ...] = ()
    for layer in model.layers:
        if isinstance(layer, layers.Flatten):
            flattened = tuple(layer.input.shape[1:])
        elif isinstance(layer, layers.Conv2D):
            yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, tuple(layer.kernel.shape), (3, 2, 0, 1))
            if layer.use_bias:
                yield _vector(f"{layer.name}.bias", layer.bias)
        elif isinstance(layer, BatchNorm):
            yield _vector(f"{layer.name}.weight", layer.gamma)
            yield _vector(f"{layer.name}.bias", layer.beta)
            yield _vector(f"{layer.name}.running_mean", layer.running_mean)
            yield _vector(f"{layer.name}.running_var", layer.running_variance)
        elif isinstance(layer, layers.Dense):
            units = layer.kernel.shape[1]
            if len(flattened) == 3:
                yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, (*flattened, units), (3, 2, 0, 1))
            else:
                yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, tuple(layer.kernel.shape), (1, 0))
            yield _vector(f"{layer.name}.bias", layer.bias)
            flattened = ()


def trainable_names(model: keras.Model) -> list[str]:
    """Canonical names of the weights that have gradients."""
    return [weight.name for weight in canonical_weights(model) if weight.variable.trainable]


def _vector(name: str, variable: keras.Variable) -> CanonicalWeight:
    return CanonicalWeight(name, variable, tuple(variable.shape), (0,))
