"""Residual networks: those of He et al. 2016, and wide ones; `tensorflow/networks/resnet.py` builds the same ones."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.functional import pad

from allstep.pytorch.networks.batch_norm import BatchNorm


def build(name: str, image_shape: tuple[int, int, int], num_classes: int, **size: int) -> nn.Module:
    """Build the network of that name for images of any size and number of channels; a wide one has a `size`."""
    if size:
        return _wide(image_shape, num_classes, **size)
    return (_resnet if name in ("resnet18", "resnet50") else _cifar)(name, image_shape, num_classes)


def _resnet(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build torchvision's network of that name, whose stride is in the 3x3 convolution of a bottleneck (version 1.5).

    It is returned as a sequence, so that it can be cut into stages; its weights have torchvision's names.
    """
    import torchvision  # takes a second

    network = torchvision.models.get_model(name, num_classes=num_classes, norm_layer=BatchNorm)
    network.conv1 = nn.Conv2d(image_shape[2], 64, 7, stride=2, padding=3, bias=False)
    parts = OrderedDict(network.named_children())
    classifier = parts.pop("fc")
    return nn.Sequential(OrderedDict(**parts, flatten=nn.Flatten(), fc=classifier))


def _cifar(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build a network of depth 6n + 2 for images of 32 x 32 pixels (He et al. 2016, section 4.2).

    It has three stages of n blocks, with 16, 32 and 64 channels. Shortcuts have no weights: at the start of a stage
    they take every second row and column and pad with channels of zeros, half of them before the others and half after
    (option A of the paper).
    """
    num_blocks = (int(name.removeprefix("resnet")) - 2) // 6
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(image_shape[2], 16, 3, padding=1, bias=False), bn1=BatchNorm(16), relu=nn.ReLU(inplace=True)
    )
    channels = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        blocks = [_CifarBlock(width if index else channels, width) for index in range(num_blocks)]
        parts[f"layer{stage}"] = nn.Sequential(*blocks)
        channels = width
    parts.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, num_classes))
    return nn.Sequential(parts)


class _CifarBlock(nn.Module):
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


def _wide(image_shape: tuple[int, int, int], num_classes: int, *, depth: int, width: int) -> nn.Module:
    """Build WRN-`depth`-`width` (Zagoruyko and Komodakis 2016) without dropout.

    Blocks normalise before they convolve. A network of depth 6n + 4 and width k has three groups of n blocks, with
    16 k, 32 k and 64 k channels; the second and the third halve the image.
    """
    num_blocks, channels = (depth - 4) // 6, 16
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["conv1"] = nn.Conv2d(image_shape[2], channels, 3, padding=1, bias=False)
    for number, stride in enumerate((1, 2, 2)):
        out = 16 * 2**number * width
        blocks = [
            _WideBlock(out if index else channels, out, stride=1 if index else stride) for index in range(num_blocks)
        ]
        parts[f"group{number + 1}"] = nn.Sequential(*blocks)
        channels = out
    parts.update(
        bn=BatchNorm(channels), relu=nn.ReLU(inplace=True), pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(),
        fc=nn.Linear(channels, num_classes),
    )  # fmt: skip
    return nn.Sequential(parts)


class _WideBlock(nn.Module):
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
