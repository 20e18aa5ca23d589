"""ResNet-18 and ResNet-50 (He et al. 2016) as in torchvision; `tensorflow/networks/resnet.py` builds the same ones.

The stride is in the 3x3 convolution of a bottleneck, as in the variant known as version 1.5.
"""

from collections import OrderedDict

import torchvision
from torch import nn

from allstep.pytorch.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build torchvision's network of that name for images of any size and number of channels.

    It is returned as a sequence, so that it can be cut into stages; its weights have torchvision's names.
    """
    network = torchvision.models.get_model(name, num_classes=num_classes, norm_layer=BatchNorm)
    network.conv1 = nn.Conv2d(image_shape[2], 64, 7, stride=2, padding=3, bias=False)
    parts = OrderedDict(network.named_children())
    classifier = parts.pop("fc")
    return nn.Sequential(OrderedDict(**parts, flatten=nn.Flatten(), fc=classifier))
