"""Changes of the averaged gradients before the optimizer's step: clipping, then noise. `tensorflow/` has both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from allstep.common.recipe.weights import gradient_noise
from allstep.pytorch.compat import scale
from allstep.pytorch.kept.network_state import array_shape
from allstep.pytorch.optimizers.layers import local_gradients, norms
from allstep.pytorch.strategies.strategy import Strategy

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class Clip:
    """--clip-norm: scale all gradients down together so that their norm is at most this."""

    largest: float
    parameters: Sequence[torch.nn.Parameter]
    strategy: Strategy

    def __call__(self, num_steps: int) -> None:
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        gradients = local_gradients(parameters)
        [tensor_norms] = norms(parameters, gradients, sliced=self.strategy.reduction.is_ordered)
        square = tensor_norms.square().sum()
        if self.strategy.cuts_network:
            square = self.strategy.sum_over_ranks(square, "square")
        scale(gradients, (self.largest / (square.sqrt() + _TINY)).clamp(max=1.0))


@dataclass(frozen=True)
class Noise:
    """--gradient-noise: add noise of variance `eta` / (1 + step)^0.55, a function of seed, step and weight."""

    eta: float
    parameters: Mapping[str, torch.nn.Parameter]
    """This rank's, by canonical name."""
    seed: int
    strategy: Strategy

    def __call__(self, num_steps: int) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                shape = array_shape(parameter)
                noise = gradient_noise(name, shape, eta=self.eta, seed=self.seed, step=num_steps)
                parameter.grad.add_(self.strategy.shard(noise, parameter.detach()))
