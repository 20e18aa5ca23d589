"""VGG-16 (Simonyan and Zisserman 2015) as torchvision has it, without dropout; `tensorflow/networks/vgg.py` builds the
same one.

Its 138 million weights, nearly all in the first fully connected layer, make it the classic case of a network that
communication holds up.
"""

from __future__ import annotations

from collections import OrderedDict

import torchvision
from torch import nn

_SHRINKS = 32  # times, in five poolings
_POOLED = 7


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Torchvision's network for images of 32 x 32 pixels or more and any number of channels.

    It comes as a sequence of its layers, so that it can be cut into stages; its weights have torchvision's names.
    """
    network = torchvision.models.vgg16(num_classes=num_classes, dropout=0.0)
    assert isinstance(network.features, nn.Sequential)
    network.features[0] = nn.Conv2d(image_shape[2], 64, 3, padding=1)
    return nn.Sequential(
        OrderedDict(
            features=network.features,
            avgpool=_pool(tuple(pixels // _SHRINKS for pixels in image_shape[:2])),
            flatten=nn.Flatten(),
            classifier=network.classifier,
        )
    )


def _pool(sides: tuple[int, ...]) -> nn.Module:
    """What AdaptiveAvgPool2d makes of so many pixels, which on GPUs has no deterministic gradient; so others do, where
    it averages nothing.
    """
    if sides == (_POOLED, _POOLED):
        return nn.Identity()
    return nn.Upsample(_POOLED) if sides == (1, 1) else nn.AdaptiveAvgPool2d(_POOLED)
