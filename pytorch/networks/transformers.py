"""Transformers for images (Dosovitskiy et al. 2021) and for texts (Vaswani et al. 2017).

`tensorflow/networks/transformers.py` builds the same ones.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, DEPTH, NUM_HEADS = 64, 2, 4
_EPSILON = 1e-6  # as in the vision transformers
_SIZES: dict[str, dict[str, Any]] = {
    "vit-tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "vit-small-images": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4},
}


def build(name: str, input_shape: tuple[int, ...], num_classes: int, *, num_tokens: int = 0) -> nn.Module:
    """Build vit-tiny or vit-small-images for images, or for texts text-encoder or text-decoder.

    text-encoder classifies by the mean over tokens, text-decoder predicts each next token; both normalise before each
    part of a block, as GPT-2, and have no dropout.
    """
    if not num_tokens:
        return _vision(name, input_shape, num_classes)
    return Transformer(input_shape[0], num_tokens, num_classes, causal=name == "text-decoder")


def _vision(name: str, image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a vision transformer as timm's, without dropout: ViT-Ti/16, or a small one for 28 or 32 pixels a side.

    Its weights have timm's names; the number of positions depends on the size of the images.
    """
    from timm.models.vision_transformer import VisionTransformer  # takes a second

    height, width, channels = image_shape
    return VisionTransformer(img_size=(height, width), in_chans=channels, num_classes=num_classes, **_SIZES[name])


class Transformer(nn.Module):
    """Maps tokens, int64 (n, length), to logits (n, num_classes), or (n, length, num_classes) if causal."""

    def __init__(self, length: int, num_tokens: int, num_classes: int, *, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, WIDTH)
        self.pos_embed = nn.Parameter(torch.zeros(1, length, WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=causal) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, _EPSILON)
        self.head = nn.Linear(WIDTH, num_classes)
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.blocks(self.embed(tokens) + self.pos_embed)
        return self.head(self.norm(values if self.causal else values.mean(1)))


class Block(nn.Module):
    """Self-attention and two fully connected layers, each with a layer norm before it and a residual connection."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, _EPSILON), nn.LayerNorm(WIDTH, _EPSILON)
        self.attn = Attention(causal=causal)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(WIDTH, 4 * WIDTH), gelu=nn.GELU(), fc2=nn.Linear(4 * WIDTH, WIDTH))
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values + self.attn(self.norm1(values))
        return values + self.mlp(self.norm2(values))


class Attention(nn.Module):
    """Multi-head self-attention; if causal, a token attends only to itself and earlier tokens."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply self-attention; `values` and the result are (samples, tokens, features)."""
        split = self.qkv(values).unflatten(-1, (3, NUM_HEADS, -1))  # samples, tokens, 3, heads, features
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.proj(attended.transpose(1, 2).flatten(2))
