"""Wide residual networks (Zagoruyko and Komodakis 2016) without dropout; `tensorflow/networks/wide_resnet.py` builds
the same ones.

Blocks normalise before they convolve. A network of depth 6n + 4 and width k has three groups of n blocks, with 16 k,
32 k and 64 k channels; the second and the third halve the image.
"""

from collections import OrderedDict

import torch
from torch import nn

from allstep.pytorch.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int, *, depth: int, width: int) -> nn.Module:
    """Build WRN-`depth`-`width` for images of any size and number of channels."""
    num_blocks, channels = (depth - 4) // 6, 16
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv1"] = nn.Conv2d(image_shape[2], channels, 3, padding=1, bias=False)
    for number, stride in enumerate((1, 2, 2)):
        out = 16 * 2**number * width
        blocks = [_Block(out if index else channels, out, stride=1 if index else stride) for index in range(num_blocks)]
        parts[f"group{number + 1}"] = nn.Sequential(*blocks)
        channels = out
    parts.update(
        bn=BatchNorm(channels), relu=nn.ReLU(inplace=True), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(),
        fc=nn.Linear(channels, num_classes),
    )  # fmt: skip
    return nn.Sequential(parts)


class _Block(nn.Module):
    """Normalises, rectifies and convolves, twice; if the shape changes, the shortcut convolves the normalised input."""

    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.bn1 = BatchNorm(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = BatchNorm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, out, 1, stride=stride, bias=False) if channels != out else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        normalised = self.bn1(values).relu()
        shortcut = values if self.shortcut is None else self.shortcut(normalised)
        return self.conv2(self.bn2(self.conv1(normalised)).relu()) + shortcut
