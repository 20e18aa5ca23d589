"""Networks that are one sequence of layers: small ones that train in seconds on one core, and VGG-16.

`tensorflow/networks/sequences.py` builds the same ones.
"""

import math
from collections import OrderedDict

from torch import nn

_SHRINKS = 32  # factor of the five poolings
_POOLED = 7


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build mlp, cnn or vgg16."""
    return {"mlp": _mlp, "cnn": _cnn, "vgg16": _vgg16}[name](image_shape, num_classes)


def _mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a network of two hidden layers with 128 units."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(input_shape), 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 128),
            relu2=nn.ReLU(),
            fc3=nn.Linear(128, num_classes),
        )
    )


def _cnn(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build the CNN of the MNIST examples, without dropout; it has 1.2 million parameters at 28 x 28 x 1."""
    height, width, channels = image_shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(inplace=True),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            relu3=nn.ReLU(inplace=True),
            fc2=nn.Linear(128, num_classes),
        )
    )


def _vgg16(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build VGG-16 (Simonyan and Zisserman 2015), without dropout, for images of 32 x 32 pixels or more.

    With 138 million weights, most of them in the first fully connected layer, it is the classic example of a network
    whose training is limited by communication. It is a sequence of layers, so that it can be cut into stages; its
    weights have torchvision's names.
    """
    import torchvision  # takes a second

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
