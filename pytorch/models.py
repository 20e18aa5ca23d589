"""The networks. `tensorflow/models.py` builds the same ones; names of parameters are the canonical ones."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from allstep.common.models import MODELS, WIDE_RESNET_DEPTH, WIDE_RESNET_WIDTH, check_image_size


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    depth: int = WIDE_RESNET_DEPTH,
    width: int = WIDE_RESNET_WIDTH,
) -> nn.Module:
    """A network that maps normalised images, float32 (n, channels, height, width), to logits (n, num_classes).

    Args:
        name: one of `common.models.MODELS`.
        image_shape: height, width, channels.
        depth, width: of a wide-resnet.

    Raises:
        UserError: the images are too small for the network, or do not fall into its patches.
    """
    check_image_size(name, *image_shape[:2])
    # Imported when chosen: some of the files import torchvision or timm, which take a second.
    module = importlib.import_module(f"allstep.pytorch.networks.{MODELS[name].module}")
    size = {"depth": depth, "width": width} if name == "wide-resnet" else {}
    return module.build(name, image_shape, num_classes, **size)


def export_weights(model: nn.Module) -> dict:
    """All weights as canonical arrays; PyTorch's own names and layouts are the canonical ones."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}


def import_weights(model: nn.Module, arrays: dict) -> None:
    """Set all weights from canonical arrays."""
    # load_state_dict would look for a count of batches beside each batch norm.
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.from_numpy(arrays[name]))
