"""Transformers for images (Dosovitskiy et al. 2021) and for texts (Vaswani et al. 2017), with timm's names.

`pytorch/networks/transformers.py` builds the same ones.
"""

from dataclasses import dataclass
from typing import Any, cast

import keras
from keras import layers, ops

WIDTH, DEPTH, NUM_HEADS = 64, 2, 4  # of those for texts
_Tensor = Any  # a KerasTensor, whose operators have no result types in Keras
_EPSILON = 1e-6  # of timm's layer norms


@dataclass(frozen=True)
class _Size:
    patch_size: int
    """Pixels per side."""
    width: int
    """Features per token."""
    depth: int
    """Number of blocks."""
    num_heads: int


_SIZES = {"vit-tiny": _Size(16, 192, 12, 3), "vit-small-images": _Size(4, 64, 4, 4)}


def build(name: str, input_shape: tuple[int, ...], num_classes: int, *, num_tokens: int = 0) -> keras.Model:
    """Build vit-tiny or vit-small-images for images, or for texts text-encoder or text-decoder."""
    if not num_tokens:
        return _vision(name, input_shape, num_classes)
    return _text(name, input_shape, num_classes, num_tokens)


def _vision(name: str, image_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Build a vision transformer as timm's, without dropout: ViT-Ti/16, or a small one for 28 or 32 pixels a side.

    The number of positions depends on the size of the images.
    """
    size = _SIZES[name]
    inputs = layers.Input(image_shape)
    values = layers.Conv2D(size.width, size.patch_size, size.patch_size, name="patch_embed.proj")(inputs)
    values = Tokens(name="tokens")(layers.Reshape((-1, size.width))(values))
    for number in range(size.depth):
        values = _block(values, f"blocks.{number}", num_heads=size.num_heads)
    values = _layer_norm(values, "norm")
    return keras.Model(inputs, layers.Dense(num_classes, name="head")(values[:, 0]))


def _text(name: str, input_shape: tuple[int, ...], num_classes: int, num_tokens: int) -> keras.Model:
    """Build text-encoder, a classifier by the mean over tokens, or text-decoder, which predicts each next token.

    Both normalise before each part of a block, as GPT-2, and have no dropout.
    """
    is_decoder = name == "text-decoder"
    tokens = layers.Input(input_shape, dtype="int64")
    values = Positions(name="positions")(layers.Embedding(num_tokens, WIDTH, name="embed")(tokens))
    for number in range(DEPTH):
        values = _block(values, f"blocks.{number}", num_heads=NUM_HEADS, causal=is_decoder)
    values = _layer_norm(values if is_decoder else ops.mean(values, 1), "norm")
    return keras.Model(tokens, layers.Dense(num_classes, name="head")(values))


def _block(values: _Tensor, name: str, *, num_heads: int, causal: bool = False) -> _Tensor:
    """Apply self-attention and two fully connected layers, each with a layer norm before it and a residual connection.

    If `causal`, a token attends only to itself and earlier tokens.
    """
    width = values.shape[-1]
    values = values + _attention(_layer_norm(values, f"{name}.norm1"), f"{name}.attn", num_heads, causal=causal)
    hidden = TokenDense(4 * width, name=f"{name}.mlp.fc1")(_layer_norm(values, f"{name}.norm2"))
    return values + TokenDense(width, name=f"{name}.mlp.fc2")(keras.activations.gelu(hidden, approximate=False))


def _attention(values: _Tensor, name: str, num_heads: int, *, causal: bool) -> _Tensor:
    """Apply self-attention; `values` and the result are (samples, tokens, features)."""
    _, num_tokens, width = values.shape
    projected = TokenDense(3 * width, name=f"{name}.qkv")(values)
    projected = layers.Reshape((num_tokens, 3, num_heads, width // num_heads))(projected)
    query, key, value = (projected[:, :, number] for number in range(3))
    attended = ops.dot_product_attention(query, key, value, is_causal=causal)
    return TokenDense(width, name=f"{name}.proj")(layers.Reshape((num_tokens, width))(attended))


class TokenDense(layers.Dense):
    """Fully connected layer for each token, which sums the bias gradient over tokens and then over samples.

    TensorFlow sums over both at once. For thousands of addends, such as the equal ones of a text's tokens after a mean,
    the error in float32 is then 2e-5 instead of 3e-7.
    """

    def call(self, inputs: _Tensor) -> _Tensor:
        num_samples = cast("tuple", ops.shape(inputs))[0]
        bias = cast("_Tensor", ops.broadcast_to(self.bias, (num_samples, 1, self.units)))
        return ops.matmul(inputs, self.kernel) + bias


def _layer_norm(values: _Tensor, name: str) -> _Tensor:
    """Apply a layer norm with timm's epsilon."""
    return layers.LayerNormalization(epsilon=_EPSILON, name=name)(values)


class Tokens(layers.Layer):
    """Prepends the class token, and adds the position embedding to each token."""

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


class Positions(layers.Layer):
    """Adds the position embedding to each token."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.pos_embed = self.add_weight(shape=(1, *input_shape[1:]), name="pos_embed", initializer="zeros")

    def call(self, values: _Tensor) -> _Tensor:
        return values + self.pos_embed
