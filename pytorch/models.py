"""Networks. `tensorflow/models.py` builds the same ones; PyTorch's parameter names are the canonical ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import LOSSES
from allstep.common.catalog.networks import MODELS, build, check_inputs, is_in_both, parsed
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.recipe.weights import initial_weights
from allstep.common.training.hooks import Hook
from allstep.common.training.loss_trial import LossCheck
from allstep.common.training.trial import TRIAL
from allstep.common.training.trial_check import TrialCheck, has_parts
from allstep.pytorch.kept.network_state import as_array, as_tensor, load, weights
from allstep.pytorch.losses import measure_of


def build_network(config: TrainConfig, dataset: Dataset, own: Any = None) -> tuple[nn.Module, Dataset]:
    """Build the network that --model names, for a data set, and note its outputs there.

    `own` replaces it by a network from a Python program, or by a function that builds one. Raises UserError if no
    network has that name, or it does not fit the data set's samples.
    """
    if config.model not in MODELS:
        from allstep.pytorch.other_networks import build_other

        needs = {"sharded": config.strategy == "fsdp", "in_parts": has_parts(config)}
        network = build_other(config.model, dataset, config.data.seed, own, parsed(config.model_args), **needs)
        return network, dataclasses.replace(dataset, num_outputs=vars(network)[TRIAL].num_outputs)
    check_inputs(config.model, dataset)
    if (kind := torch.get_default_dtype()) != torch.float32:
        raise UserError(
            f"expected float32 as the default type for --model {config.model}, received {kind}; leave it so"
        )
    size = {**config.model_size, "num_tokens": dataset.num_tokens}
    return build_model(config.model, dataset.input_shape, dataset.num_classes, **size), dataset


def hooks_of(config: TrainConfig, network: nn.Module) -> Sequence[Hook]:
    """Return the hooks that a network and its loss need; networks of the suite need none."""
    checks = [LossCheck(measure_of(config.loss))] if config.loss and config.loss not in LOSSES else []
    if config.model in MODELS:
        return checks
    from allstep.pytorch.kept.pass_state import RUNNING, pass_state
    from allstep.pytorch.other_networks import Reseed
    from allstep.pytorch.trial import NormCheck

    trial = TrialCheck(pass_state(network), averaged=RUNNING, puts_back=True)
    return Reseed(), trial, NormCheck(network), *checks


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int, **size: int) -> nn.Module:
    """See `common.catalog.networks.build`."""
    return build("pytorch", name, input_shape, num_classes, **size)


def set_initial_weights(network: nn.Module, config: TrainConfig) -> None:
    """Set the weights from which both frameworks start, if both have the network; others keep their initial weights."""
    if is_in_both(config.model):
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        import_weights(network, initial_weights(shapes, config.data.seed))


def export_weights(model: nn.Module) -> dict:
    """Return all weights as canonical arrays, which have PyTorch's names and layouts."""
    return {name: as_array(tensor) for name, tensor in weights(model)}


def import_weights(model: nn.Module, arrays: dict) -> None:
    """Set all weights from canonical arrays."""
    load(model, {name: as_tensor(arrays[name], tensor) for name, tensor in weights(model) if name in arrays})
