"""The networks. `tensorflow/models.py` builds the same ones; names of parameters are the canonical ones."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from allstep.common.catalog.networks import (
    MODELS,
    WIDE_RESNET_DEPTH,
    WIDE_RESNET_WIDTH,
    check_image_size,
    check_inputs,
    is_in_both,
)
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.recipe.weights import initial_weights
from allstep.common.training.hooks import Hook


def build_network(config: TrainConfig, dataset: Dataset, own: Any = None) -> nn.Module:
    """The network that --model names, for a data set.

    Args:
        own: of a program, in place of one that a flag names: the network, or a function that builds it.

    Raises:
        UserError: there is none of that name, or it is for other samples.
    """
    if config.model not in MODELS:
        from allstep.pytorch.other_networks import build_other

        return build_other(config.model, dataset, config.data.seed, own)
    check_inputs(config.model, dataset)
    size = {**config.model_size, "num_tokens": dataset.num_tokens}
    return build_model(config.model, dataset.input_shape, dataset.num_classes, **size)


def hooks_of(config: TrainConfig, network: nn.Module) -> Sequence[Hook]:
    """What a network needs beside a training loop: those that are not the suite's may draw random numbers."""
    if config.model in MODELS:
        return ()
    from allstep.pytorch.other_networks import Reseed

    return (Reseed(network),)


def build_model(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    depth: int = WIDE_RESNET_DEPTH,
    width: int = WIDE_RESNET_WIDTH,
    num_tokens: int = 0,
) -> nn.Module:
    """A network that maps samples to logits (n, num_classes), or (n, length, num_classes) for text-decoder.

    Samples are normalised images, float32 (n, channels, height, width), or texts, int64 (n, length).

    Args:
        name: one of `common.catalog.networks.MODELS`.
        input_shape: height, width, channels of an image; for mlp any; length of a text.
        depth, width: of a wide-resnet.
        num_tokens: of a text.

    Raises:
        UserError: the images are too small for the network, or do not fall into its patches.
    """
    if len(input_shape) == 3:
        check_image_size(name, *input_shape[:2])
    # Imported when chosen: some of the files import torchvision or timm, which take a second.
    module = importlib.import_module(f"allstep.pytorch.networks.{MODELS[name].module}")
    size = {"depth": depth, "width": width} if name == "wide-resnet" else {}
    if MODELS[name].takes_text:
        size = {"num_tokens": num_tokens}
    return module.build(name, input_shape, num_classes, **size)


def set_initial_weights(network: nn.Module, config: TrainConfig) -> None:
    """Give a network that both frameworks have the weights that both start from; others keep their own."""
    if is_in_both(config.model):
        shapes = {name: array.shape for name, array in export_weights(network).items()}
        import_weights(network, initial_weights(shapes, config.data.seed))


def named_weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What training changes: of a network's state, all but whole numbers, which say how it is built."""
    return ((name, tensor) for name, tensor in network.state_dict().items() if tensor.is_floating_point())


def export_weights(model: nn.Module) -> dict:
    """All weights as canonical arrays; PyTorch's own names and layouts are the canonical ones."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in named_weights(model)}


def import_weights(model: nn.Module, arrays: dict) -> None:
    """Set all weights from canonical arrays."""
    # load_state_dict would look for a count of batches beside each batch norm.
    for name, tensor in named_weights(model):
        tensor.copy_(torch.from_numpy(arrays[name]))
