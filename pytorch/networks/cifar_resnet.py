"""ResNets for images of 32 x 32 pixels (He et al. 2016, section 4.2); `tensorflow/networks/cifar_resnet.py` builds the
same ones.

A network of depth 6n + 2 has three stages of n blocks, with 16, 32 and 64 channels. Shortcuts have no weights: at the
start of a stage they take every second row and column and pad with channels of zeros, half of them before the others
and half after (option A of the paper).
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.functional import pad

from allstep.pytorch.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build resnet32, resnet44, resnet56 or resnet110 for images of any size and number of channels."""
    num_blocks = (int(name.removeprefix("resnet")) - 2) // 6
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(image_shape[2], 16, 3, padding=1, bias=False), bn1=BatchNorm(16), relu=nn.ReLU(inplace=True)
    )
    channels = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        blocks = [_Block(width if index else channels, width) for index in range(num_blocks)]
        parts[f"layer{stage}"] = nn.Sequential(*blocks)
        channels = width
    parts.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, num_classes))
    return nn.Sequential(parts)


class _Block(nn.Module):
    """Two convolutions and a shortcut; a block that adds channels halves the image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self._added, self._stride = width - channels, 1 if width == channels else 2
        self.conv1 = nn.Conv2d(channels, width, 3, stride=self._stride, padding=1, bias=False)
        self.bn1 = BatchNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = BatchNorm(width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        shortcut = values
        if self._added:
            shortcut = pad(values[:, :, ::2, ::2], (0, 0, 0, 0, self._added // 2, self._added // 2))
        values = self.bn2(self.conv2(self.bn1(self.conv1(values)).relu()))
        return (values + shortcut).relu()
