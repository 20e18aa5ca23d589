"""Networks from a user's file, from timm or from torchvision; `tensorflow/other_networks.py` has those for Keras.

Weights have PyTorch's names. The network draws its initial weights by --seed, and all ranks start from those of rank 0.
If a file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the
suite's canonical weights, so that their curves can be compared.
"""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from allstep.common.base.errors import UserError, note
from allstep.common.catalog import user_file
from allstep.common.catalog.network_outputs import check_outputs, no_gradient
from allstep.common.catalog.networks import cannot_build, network_of_user, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import TRIAL, are_probabilities
from allstep.pytorch.kept.network_state import check, is_lazy, make_dense
from allstep.pytorch.kept.pass_state import pass_state
from allstep.pytorch.numerics import check_settings
from allstep.pytorch.trial import try_network


def build_other(
    model: str,
    dataset: Dataset,
    seed: int,
    own: Any = None,
    options: Mapping[str, Any] = {},
    *,
    sharded: bool = True,
    in_parts: bool = True,
) -> nn.Module:
    """Build the network that `model` names and try it on two samples of random numbers.

    Raises UserError if no network has that name, it cannot be built, or its outputs do not fit the data set.

    Args:
        model: FILE.py:FUNCTION, timm:NAME or torchvision:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.
        sharded: whether the strategy has to know how weights are used (see `kept.uses`).
        in_parts: whether a batch may be computed in parts, so that the trial covers their effects as well.
    """
    torch.manual_seed(seed)
    if own is not None or user_file.parse(model):
        has_gradients = torch.is_grad_enabled()
        network = network_of_user(model, "pytorch", dataset, own, options, kind=nn.Module)
        check_settings(torch.empty(0).device)
        if has_gradients and not torch.is_grad_enabled():
            raise UserError(
                f"expected gradients after --model {model} is built, received none, as after set_grad_enabled(False); "
                "use torch.no_grad() as a context around what needs none"
            )
        if not isinstance(network, nn.Module):
            raise UserError(
                f"expected a torch.nn.Module from --model {model}, received {type(network).__name__}; return one"
            )
        _check_wrappers(network, model)
        _check_weights(network, model)
        weights = {name for name, _ in network.named_parameters()}
        expected = f"a network for samples of shape {dataset.input_shape}"
        outputs = user_file.call(
            try_network, network, dataset, sharded, in_parts=in_parts, flag=f"--model {model}", expected=expected
        )
        if created := next((name for name, _ in network.named_parameters() if name not in weights), None):
            raise UserError(
                f"expected all weights of --model {model} before its first pass, received {created}, which the pass "
                "creates; call the network once before you return it"
            )
    else:
        network, outputs = _of_library(model, dataset, options, seed, sharded=sharded)
    if isinstance(outputs, np.ndarray):
        raise no_gradient()
    check_outputs(model, outputs, dataset)
    logits = cast(torch.Tensor, outputs).float().numpy(force=True)
    found = {"ends_in_softmax": are_probabilities(logits), "num_outputs": logits.shape[-1]}
    vars(network)[TRIAL] = dataclasses.replace(pass_state(network), **found)
    if unused := next((name for name, module in network.named_modules() if is_lazy(module)), None):
        raise UserError(
            f"expected all lazy layers of --model {model} to be used, received {unused}, whose shapes are not known "
            "after a pass; give it its sizes, or remove it"
        )
    _check_weights(network, model)  # again, since lazy layers have weights now
    return network


def _of_library(
    model: str, dataset: Dataset, options: Mapping[str, Any], seed: int, *, sharded: bool
) -> tuple[nn.Module, object]:
    """Return a library's network and its outputs; if it cannot be built without the size of images, give it."""
    library, _, name = model.partition(":")
    build = {"timm": _timm, "torchvision": _torchvision}[library]
    try:
        network = build(name, dataset, options)
        return network, try_network(network, dataset, sharded, of_library=True)
    except UserError:
        raise
    except Exception as error:
        height, width, *_ = (*dataset.input_shape, 0)
        size = {"img_size": (height, width)} if library == "timm" else {"image_size": height}
        try:
            torch.manual_seed(seed)
            network = build(name, dataset, {**size, **options})
            outputs = try_network(network, dataset, sharded, of_library=True)
        except Exception:
            raise cannot_build(model, dataset, error) from error
        if apparent_rank() == 0:
            note(f"--model {model} is built for images of {height} x {width} pixels")
        return network, outputs


def _timm(name: str, dataset: Dataset, options: Mapping[str, Any]) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise unknown_name(f"timm:{name}", timm.list_models())
    return timm.create_model(name, num_classes=dataset.num_classes, in_chans=_channels(dataset), **options)


def _torchvision(name: str, dataset: Dataset, options: Mapping[str, Any]) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if name not in names:
        raise unknown_name(f"torchvision:{name}", names)
    network = models.get_model(name, weights=None, num_classes=dataset.num_classes, **options)
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


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def _check_wrappers(network: nn.Module, model: str) -> None:
    """Refuse modules that exchange gradients themselves, unnoticed by the strategy."""
    for name, module in network.named_modules():
        if found := {kind.__name__ for kind in type(module).__mro__} & _WRAPPERS:
            raise UserError(
                f"expected a network from --model {model} that --strategy can wrap, received {name or 'it'} in a "
                f"{found.pop()} already; give the module without it"
            )


def _check_weights(network: nn.Module, model: str) -> None:
    check(network, model)
    make_dense(network, model)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


class Reseed(Hook):
    """Reseeds global generators in each step by seed, step and rank, so that layers of a resumed run draw the same."""

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    on_step = on_epoch = on_start  # validation may draw as well
