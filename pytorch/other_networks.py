"""Networks from a user's file, from timm or from torchvision; `tensorflow/other_networks.py` has those for Keras.

Weights have PyTorch's names. The network draws its initial weights by --seed, and all ranks start from those of rank 0.
If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the
suite's canonical weights, so that their curves can be compared.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import cannot_build, check_outputs, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.pytorch.compat import BatchNorm


def build_other(model: str, dataset: Dataset, seed: int, own: Any = None) -> nn.Module:
    """Build the network that `model` names and try it on two samples of zeros.

    Args:
        model: FILE.py:FUNCTION, timm:NAME or torchvision:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.

    Raises:
        UserError: no network has that name, it cannot be built, or its outputs do not fit the data set.
    """
    torch.manual_seed(seed)
    if own is not None or user_file.parse(model):
        network = _of_user(model, dataset, own)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"expected a torch.nn.Module from --model {model}, received {type(network).__name__}; return one"
            )
        outputs = user_file.call(_outputs, network, dataset, flag=f"--model {model}")
    else:
        library, _, name = model.partition(":")
        try:
            network = {"timm": _timm, "torchvision": _torchvision}[library](name, dataset)
            outputs = _outputs(network, dataset)
        except UserError:
            raise
        except Exception as error:
            raise cannot_build(model, dataset, error) from error
    check_outputs(model, tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else None, dataset)
    _check_weights(network, model)
    return network


def _of_user(model: str, dataset: Dataset, own: Any) -> object:
    """Return the network that a program passes or a file builds."""
    if isinstance(own, nn.Module):
        return own
    file = user_file.parse(model)
    build = user_file.import_for("pytorch", *file, "--model") if file else own
    return user_file.call(build, dataset.input_shape, dataset.num_classes, flag="--model")


def _outputs(network: nn.Module, dataset: Dataset) -> object:
    """Move the network to the default device, and return its outputs for two samples of zeros."""
    shape = (2, *dataset.input_shape)
    inputs = torch.zeros(shape, dtype=torch.int64 if dataset.input_type == "int64" else torch.float32)
    network.to(inputs.device).eval()
    with torch.no_grad():
        outputs = network(inputs.permute(0, 3, 1, 2) if len(shape) == 4 else inputs)
    network.train()
    return outputs


def _timm(name: str, dataset: Dataset) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise unknown_name(f"timm:{name}", timm.list_models())
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=_channels(dataset))


def _torchvision(name: str, dataset: Dataset) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise unknown_name(f"torchvision:{name}", names)
    network = models.get_model(name, weights=None, num_classes=dataset.num_classes)
    if _channels(dataset) != 3:
        _take_channels(network, _channels(dataset))
    return network


def _channels(dataset: Dataset) -> int:
    if len(dataset.input_shape) != 3:
        raise ValueError("it is for images")
    return dataset.input_shape[2]


def _take_channels(network: nn.Module, channels: int) -> None:
    """Replace the first convolution of a torchvision network, which takes three channels, by one for `channels`."""
    for module in network.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.Conv2d):
                shape = (child.kernel_size, child.stride, child.padding)
                first = nn.Conv2d(channels, child.out_channels, *cast("Any", shape), bias=child.bias is not None)
                setattr(module, name, first)
                return


def _check_weights(network: nn.Module, model: str) -> None:
    if odd := [name for name, tensor in network.state_dict().items() if tensor.dtype in _OTHER_FLOATS]:
        raise UserError(f"expected weights in float32 of --model {model}, received others, as {odd[0]}; convert them")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")
    for name, module in network.named_modules():
        if isinstance(module, BatchNorm):
            if module.momentum is None:
                raise UserError(
                    f"expected batch norms with a momentum in --model {model}, received {name} without; give it one, "
                    "as in 0.1"
                )
            module.register_buffer("num_batches_tracked", None)  # PyTorch needs it only without momentum


_OTHER_FLOATS = (torch.float16, torch.bfloat16, torch.float64)


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: nn.Module) -> None:
        """Take a network, which needs no handle here because it draws from PyTorch's global generators."""

    def on_start(self, session: TrainingRun) -> None:
        torch.manual_seed(step_seed(session.config.data.seed, session.progress.step, session.placement.rank))

    on_step = on_start
