"""Builders of the parts of a training step, the only place where flags select them."""

import torch

from allstep.common.catalog.losses import default_loss
from allstep.common.config.train_config import OWN_OPTIMIZER, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.pytorch.inputs import Inputs
from allstep.pytorch.losses import build_loss, with_heads
from allstep.pytorch.observer import GradientSquares, Observer, WeightAverage
from allstep.pytorch.optimizers import embeddings_of
from allstep.pytorch.optimizers.state import CanonicalSlots, OptimizerState, OwnState
from allstep.pytorch.passes import Passes, TrainPass
from allstep.pytorch.precision import Autocast, Precision, ScaledFp16
from allstep.pytorch.slices import Slices
from allstep.pytorch.state import local_parameters
from allstep.pytorch.step import Change, Clip, Noise, Step
from allstep.pytorch.strategies.reduction import Ordered
from allstep.pytorch.strategies.strategy import Strategy


def build_step(
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    strategy: Strategy,
    inputs: Inputs,
    precision: Precision,
    *,
    dataset: Dataset,
    measures_noise: bool,
) -> Step:
    """Return the training step of a run; see `Worker` for `network`.

    `measures_noise` tells whether the gradients of passes are measured for the noise scale.
    """
    flags, reduction, parameters = config.optimizer, strategy.reduction, dict(local_parameters(network))
    changes: list[Change] = []
    if flags.clip_norm is not None:
        changes.append(Clip(flags.clip_norm, list(parameters.values()), strategy))
    if flags.gradient_noise:
        changes.append(Noise(flags.gradient_noise, parameters, config.data.seed, strategy))
    observers: list[Observer] = []
    if measures_noise:
        observers.append(GradientSquares(network.parameters()))
    if flags.ema is not None:
        observers.append(WeightAverage(network, flags.ema))
    name, weights = config.loss or default_loss(dataset.task), dataset.class_weights
    class_weights = torch.tensor(weights, device=inputs.device) if weights else None
    loss = with_heads(build_loss(name, flags.label_smoothing, class_weights))
    one_pass = reduction.train_pass(TrainPass(reduction.model, loss))
    if isinstance(reduction, Ordered):
        backward = Slices(reduction, one_pass, inputs, precision, observers, strategy.collectives, config.data.seed)
    else:
        backward = Passes(config.parallel.accumulate_steps, network, one_pass, inputs, precision, observers)
    return Step(
        optimizer,
        network.parameters(),
        backward=backward,
        reduction=reduction,
        precision=precision,
        changes=changes,
        observers=observers,
    )


def build_precision(config: TrainConfig, strategy: Strategy, device: torch.device) -> Precision:
    """Return the precision of --precision, in which layers compute."""
    if config.precision == "fp16":
        return ScaledFp16(device, strategy.overflowed_anywhere)
    return Autocast(device, torch.bfloat16) if config.precision == "bf16" else Precision()


def build_optimizer_state(
    optimizer: torch.optim.Optimizer, network: torch.nn.Module, config: TrainConfig, device: torch.device
) -> OptimizerState:
    """Return the optimizer's state in checkpoints."""
    if config.optimizer.optimizer == OWN_OPTIMIZER:
        return OwnState(optimizer)
    embeddings = embeddings_of(network)

    def slots_of(parameter: torch.nn.Parameter) -> tuple[str, ...]:
        return config.optimizer.slots_of(parameter.ndim, is_embedding=parameter in embeddings)

    return CanonicalSlots(optimizer, slots_of, device)
