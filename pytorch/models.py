"""The networks. `tensorflow/models.py` builds the same ones; names of parameters are the canonical ones."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from allstep.common.config.validation import check_image_size


def build_model(name: str, image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A network that maps normalised images, float32 (n, channels, height, width), to logits (n, num_classes).

    Args:
        name: mlp, cnn, resnet18 or resnet50.
        image_shape: height, width, channels.

    Raises:
        UserError: the images are too small for the network.
    """
    if name.startswith("resnet"):
        from allstep.pytorch.resnet import resnet  # it imports torchvision, which takes a second

        return resnet(name, image_shape, num_classes)
    return {"mlp": _mlp, "cnn": _cnn}[name](image_shape, num_classes)


def _mlp(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Two hidden layers of 128 units."""
    height, width, channels = image_shape
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(height * width * channels, 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 128),
            relu2=nn.ReLU(),
            fc3=nn.Linear(128, num_classes),
        )
    )


def _cnn(image_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The convolutional network of the MNIST examples, without dropout; 1.2 million parameters at 28 x 28 x 1."""
    height, width, channels = image_shape
    check_image_size("cnn", height, width)
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


def export_weights(model: nn.Module) -> dict:
    """All weights as canonical arrays; PyTorch's own names and layouts are the canonical ones."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def import_weights(model: nn.Module, arrays: dict) -> None:
    """Set all weights from canonical arrays."""
    # load_state_dict would look for a count of batches beside each batch norm.
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(arrays[name]))
