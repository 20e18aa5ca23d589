"""What is done to the averaged gradient before the optimizer takes it: clipping and, after it, noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from allstep.common.config.train_config import OptimizerConfig
from allstep.common.recipe.gradient_noise import gradient_noise
from allstep.pytorch.compat import scale
from allstep.pytorch.optimizers.layers import local_gradients, norms
from allstep.pytorch.strategies.strategy import Strategy

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


@dataclass(frozen=True)
class GradientChanges:
    """The changes that the flags ask for; `gradients` of `tensorflow/` has the same."""

    flags: OptimizerConfig
    seed: int
    """Of the noise."""
    strategy: Strategy

    def apply(self, parameters: Mapping[str, torch.nn.Parameter], step: int) -> None:
        """Change the gradients of this rank's parameters, by canonical name, in place.

        Args:
            step: steps taken before this one.
        """
        if self.flags.clip_norm is not None:
            self._clip(list(parameters.values()), self.flags.clip_norm)
        if self.flags.gradient_noise:
            self._add_noise(parameters, step)

    def _clip(self, parameters: list[torch.nn.Parameter], maximum: float) -> None:
        gradients = local_gradients(parameters)
        [tensor_norms] = norms(parameters, gradients, sliced=self.strategy.flags.slices is not None)
        square = tensor_norms.square().sum()
        if self.strategy.cuts_network:
            dist.all_reduce(square)
        scale(gradients, (maximum / (square.sqrt() + _TINY)).clamp(max=1.0))

    def _add_noise(self, parameters: Mapping[str, torch.nn.Parameter], step: int) -> None:
        for name, parameter in parameters.items():
            shape, eta = tuple(parameter.shape), self.flags.gradient_noise
            noise = gradient_noise(name, shape, eta=eta, seed=self.seed, step=step)
            if parameter.grad is not None:
                parameter.grad.add_(self.strategy.shard(noise, parameter.detach()))
