"""The networks. `pytorch/models.py` builds the same ones; layers are named so that weights have canonical names."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers

from allstep.common.models import MODELS, WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH, check_image_size
from allstep.tensorflow.networks.resnet import BatchNorm
from allstep.tensorflow.networks.vision_transformer import Tokens

# Keras' names; weights are float32 in any case.
_POLICIES = {"float32": "float32", "tf32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    depth: int = WIDE_RESNET_DEPTH,
    width: int = WIDE_RESNET_WIDTH,
    precision: str = "float32",
) -> keras.Model:
    """A network that maps normalised images, float32 (n, height, width, channels), to logits (n, num_classes).

    Args:
        name: one of `common.models.MODELS`.
        image_shape: height, width, channels.
        depth, width: of a wide-resnet.
        precision: in which its layers compute: float32, tf32, bf16 or fp16.

    Raises:
        UserError: the images are too small for the network, or do not fall into its patches.
    """
    check_image_size(name, *image_shape[:2])
    keras.config.set_dtype_policy(_POLICIES[precision])
    module = importlib.import_module(f"allstep.tensorflow.networks.{MODELS[name].module}")
    size = {"depth": depth, "width": width} if name == "wide-resnet" else {}
    return module.build(name, image_shape, num_classes, **size)


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
        # np.ascontiguousarray would give one number an axis.
        return np.asarray(canonical.reshape(canonical.shape[0], -1) if self._was_flattened else canonical, order="C")

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
            flattened = _shape(layer.input)[1:]
        elif isinstance(layer, layers.Conv2D):
            yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, _shape(layer.kernel), (3, 2, 0, 1))
            if layer.use_bias:
                yield _unchanged(f"{layer.name}.bias", layer.bias)
        elif isinstance(layer, BatchNorm):
            yield _unchanged(f"{layer.name}.weight", layer.gamma)
            yield _unchanged(f"{layer.name}.bias", layer.beta)
            yield _unchanged(f"{layer.name}.running_mean", layer.running_mean)
            yield _unchanged(f"{layer.name}.running_var", layer.running_variance)
        elif isinstance(layer, layers.LayerNormalization):
            yield _unchanged(f"{layer.name}.weight", layer.gamma)
            yield _unchanged(f"{layer.name}.bias", layer.beta)
        elif isinstance(layer, Tokens):
            yield _unchanged("cls_token", layer.cls_token)
            yield _unchanged("pos_embed", layer.pos_embed)
        elif isinstance(layer, layers.Dense):
            _, units = _shape(layer.kernel)
            if len(flattened) == 3:
                yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, (*flattened, units), (3, 2, 0, 1))
            else:
                yield CanonicalWeight(f"{layer.name}.weight", layer.kernel, _shape(layer.kernel), (1, 0))
            yield _unchanged(f"{layer.name}.bias", layer.bias)
            flattened = ()


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def trainable_names(model: keras.Model) -> list[str]:
    """Canonical names of the weights that have gradients."""
    return [weight.name for weight in canonical_weights(model) if weight.variable.trainable]


def _unchanged(name: str, variable: keras.Variable) -> CanonicalWeight:
    """A weight with one layout in both frameworks."""
    return CanonicalWeight(name, variable, tuple(variable.shape), tuple(range(len(variable.shape))))
