"""VGG-16 (Simonyan and Zisserman 2015) as in torchvision, without dropout; `tensorflow/networks/vgg.py` builds the same
one.

With 138 million weights, most of them in the first fully connected layer, it is the classic example of a network whose
training is limited by communication.
"""

from collections import OrderedDict

import torchvision
from torch import nn

_SHRINKS = 32  # factor of the five poolings
_POOLED = 7


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build torchvision's network for images of 32 x 32 pixels or more and any number of channels.

    It is returned as a sequence of layers, so that it can be cut into stages; its weights have torchvision's names.
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
    """Return AdaptiveAvgPool2d, or a layer of the same result if it would average nothing: its gradient is not
    deterministic on GPUs.
    """
    if sides == (_POOLED, _POOLED):
        return nn.Identity()
    return nn.Upsample(_POOLED) if sides == (1, 1) else nn.AdaptiveAvgPool2d(_POOLED)
