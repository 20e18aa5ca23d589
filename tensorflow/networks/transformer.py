"""Small transformers for text (Vaswani et al. 2017) with pre-normalisation as in GPT-2 and without dropout;
`pytorch/networks/transformer.py` builds the same ones."""

from typing import Any

import keras
from keras import layers, ops

from allstep.tensorflow.networks.vision_transformer import block, layer_norm

WIDTH, DEPTH, NUM_HEADS = 64, 2, 4


def build(name: str, input_shape: tuple[int, ...], num_classes: int, *, num_tokens: int) -> keras.Model:
    """Build text-encoder, a classifier by the mean over tokens, or text-decoder, which predicts each next token."""
    is_decoder = name == "text-decoder"
    tokens = layers.Input(input_shape, dtype="int64")
    values = Positions(name="positions")(layers.Embedding(num_tokens, WIDTH, name="embed")(tokens))
    for number in range(DEPTH):
        values = block(values, f"blocks.{number}", num_heads=NUM_HEADS, causal=is_decoder)
    values = layer_norm(values if is_decoder else ops.mean(values, 1), "norm")
    return keras.Model(tokens, layers.Dense(num_classes, name="head")(values))


class Positions(layers.Layer):
    """Adds the position embedding to each token."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        self.pos_embed = self.add_weight(shape=(1, *input_shape[1:]), name="pos_embed", initializer="zeros")

    def call(self, values: Any) -> Any:
        return values + self.pos_embed
