"""Small transformers for text (Vaswani et al. 2017) with pre-normalisation as in GPT-2 and without dropout;
`tensorflow/networks/transformer.py` builds the same ones."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, DEPTH, NUM_HEADS = 64, 2, 4
_EPSILON = 1e-6  # as in the vision transformers


def build(name: str, input_shape: tuple[int, ...], num_classes: int, *, num_tokens: int) -> nn.Module:
    """Build text-encoder, a classifier by the mean over tokens, or text-decoder, which predicts each next token."""
    return Transformer(input_shape[0], num_tokens, num_classes, causal=name == "text-decoder")


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
