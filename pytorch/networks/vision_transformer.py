"""Vision transformers (Dosovitskiy et al. 2021) as in timm, without dropout;
`tensorflow/networks/vision_transformer.py` builds the same ones."""

from typing import Any

from timm.models.vision_transformer import VisionTransformer
from torch import nn

_SIZES: dict[str, dict[str, Any]] = {
    "vit-tiny": {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3},
    "vit-small-images": {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4},
}


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build timm's network: vit-tiny is ViT-Ti/16, vit-small-images is for images of 28 x 28 or 32 x 32 pixels.

    Its weights have timm's names; the number of positions depends on the size of the images.
    """
    height, width, channels = image_shape
    return VisionTransformer(img_size=(height, width), in_chans=channels, num_classes=num_classes, **_SIZES[name])
