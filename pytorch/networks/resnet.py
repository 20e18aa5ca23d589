"""ResNet-18 and ResNet-50 (He et al. 2016) as in torchvision; `tensorflow/networks/resnet.py` builds the same ones.

The stride is in the 3x3 convolution of a bottleneck, which is known as version 1.5.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torchvision
from torch import nn


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Torchvision's network of that name for images of any size and number of channels.

    It comes as a sequence of its parts, so that it can be cut into stages; its weights have torchvision's names.
    """
    network = torchvision.models.get_model(name, num_classes=num_classes, norm_layer=BatchNorm)
    network.conv1 = nn.Conv2d(image_shape[2], 64, 7, stride=2, padding=3, bias=False)
    parts = OrderedDict(network.named_children())
    classifier = parts.pop("fc")
    return nn.Sequential(OrderedDict(**parts, flatten=nn.Flatten(), fc=classifier))


class BatchNorm(nn.BatchNorm2d):
    """Batch norm whose state is the one that Keras has, too: it does not count batches."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.num_batches_tracked = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Normalise `values`, (samples, channels, height, width).

        One sample of one pixel, which small images have left in the last layers, becomes the shift as in TensorFlow;
        PyTorch's own refuses it.
        """
        if not self.training or values.numel() > values.shape[1]:
            return super().forward(values)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        with torch.no_grad():
            self.running_mean.lerp_(values.flatten(), self.momentum)
            self.running_var.lerp_(torch.zeros_like(self.running_var), self.momentum)
        shape = (1, -1, 1, 1)
        # Times 1: or else the gradient of the bias would be the memory of the output's, which a shortcut's bias shares,
        # and Horovod averages gradients in place.
        return (values - values) * self.weight.view(shape) + 1 * self.bias.view(shape)
