"""Vision transformers (Dosovitskiy et al. 2021) with timm's topology and names, without dropout;
`pytorch/networks/vision_transformer.py` has the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import keras
from keras import layers, ops

_Tensor = Any  # a KerasTensor, but of what its operators make of it Keras' types know nothing
_EPSILON = 1e-6  # timm's, of its layer norms


@dataclass(frozen=True)
class _Size:
    patch_size: int
    """Pixels on a side."""
    width: int
    """Features of a token."""
    depth: int
    """Blocks."""
    num_heads: int


_SIZES = {"vit-tiny": _Size(16, 192, 12, 3), "vit-small-images": _Size(4, 64, 4, 4)}


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> keras.Model:
    """vit-tiny is ViT-Ti/16, vit-small-images one for images of 28 x 28 or 32 x 32 pixels.

    For another size of images there are more or fewer positions.
    """
    size = _SIZES[name]
    inputs = layers.Input(image_shape)
    values = layers.Conv2D(size.width, size.patch_size, size.patch_size, name="patch_embed.proj")(inputs)
    values = Tokens(name="tokens")(layers.Reshape((-1, size.width))(values))
    for number in range(size.depth):
        values = block(values, f"blocks.{number}", num_heads=size.num_heads)
    values = layer_norm(values, "norm")
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(values[:, 0]))


def block(values: _Tensor, name: str, *, num_heads: int, causal: bool = False) -> _Tensor:
    """Self-attention and two fully connected layers, each behind a layer norm and beside a shortcut.

    Args:
        causal: a token sees itself and those before it alone.
    """
    width = values.shape[-1]
    values = values + _attention(layer_norm(values, f"{name}.norm1"), f"{name}.attn", num_heads, causal=causal)
    hidden = TokenDense(4 * width, name=f"{name}.mlp.fc1")(layer_norm(values, f"{name}.norm2"))
    return values + TokenDense(width, name=f"{name}.mlp.fc2")(keras.activations.gelu(hidden, approximate=False))


def _attention(values: _Tensor, name: str, num_heads: int, *, causal: bool) -> _Tensor:
    """`values` and the result: (samples, tokens, features)."""
    _, num_tokens, width = values.shape
    projected = TokenDense(3 * width, name=f"{name}.qkv")(values)
    projected = layers.Reshape((num_tokens, 3, num_heads, width // num_heads))(projected)
    query, key, value = (projected[:, :, number] for number in range(3))
    attended = ops.dot_product_attention(query, key, value, is_causal=causal)
    return TokenDense(width, name=f"{name}.proj")(layers.Reshape((num_tokens, width))(attended))


class TokenDense(layers.Dense):
    """A fully connected layer for each token, the gradient of whose bias is added up over tokens and then over samples.

    TensorFlow's adds up all in a row. Thousands of numbers, equal ones for the tokens of a text whose mean is taken,
    then have an error of 2e-5 in float32, in place of 3e-7.
    """

    def call(self, inputs: _Tensor) -> _Tensor:
        num_samples = cast("tuple", ops.shape(inputs))[0]
        bias = cast("_Tensor", ops.broadcast_to(self.bias, (num_samples, 1, self.units)))
        return ops.matmul(inputs, self.kernel) + bias


def layer_norm(values: _Tensor, name: str) -> _Tensor:
    """With timm's epsilon."""
    return layers.LayerNormalization(epsilon=_EPSILON, name=name)(values)


class Tokens(layers.Layer):
    """Puts the token that stands for the class before the others, and adds to each what says where it is."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        _, num_patches, width = input_shape
        self.cls_token = self.add_weight(shape=(1, 1, width), name="cls_token", initializer="zeros")
        self.pos_embed = self.add_weight(shape=(1, num_patches + 1, width), name="pos_embed", initializer="zeros")

    def compute_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        samples, num_patches, width = input_shape
        return samples, num_patches + 1, width

    def call(self, patches: _Tensor) -> _Tensor:
        first = ops.broadcast_to(self.cls_token, (cast("tuple", ops.shape(patches))[0], 1, patches.shape[-1]))
        return ops.concatenate([first, patches], axis=1) + self.pos_embed
