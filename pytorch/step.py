"""One training step, from a batch to changed weights, and what changes averaged gradients: clipping, then noise.

`tensorflow/step.py` reads the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import torch

from allstep.common.data.loader import Batch
from allstep.common.recipe.schedule import rate_factors
from allstep.common.recipe.weights import gradient_noise
from allstep.common.training.worker import StepResult
from allstep.pytorch.compat import scale
from allstep.pytorch.kept.network_state import array_shape
from allstep.pytorch.observer import Observer
from allstep.pytorch.optimizers.layers import local_gradients, norms
from allstep.pytorch.precision import Precision
from allstep.pytorch.strategies.reduction import Reduction
from allstep.pytorch.strategies.strategy import Strategy

Change = Callable[[int], None]
"""Changes the averaged gradients in place; takes the number of steps taken before this one."""


Backward = Callable[[Batch, float, int], torch.Tensor]
"""`Passes` or `Slices`: takes a batch, the loss scale and the number of earlier steps; adds up this rank's gradients in
the parameters, or sends them to other ranks; returns the sum of the losses of this rank's samples."""


class Step:
    """A training step. Its parts are chosen once, by `building.build_step`; optional parts have neutral bases."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[torch.nn.Parameter],
        *,
        backward: Backward,
        reduction: Reduction,
        precision: Precision,
        changes: Sequence[Change],
        observers: list[Observer],
    ) -> None:
        """`parameters` are all those of the network, including any that the optimizer does not have."""
        self.optimizer, self._parameters = optimizer, list(parameters)
        self._factors = rate_factors([float(group["lr"]) for group in optimizer.param_groups])
        self.backward, self.reduction, self.precision = backward, reduction, precision
        self.changes, self.observers = changes, observers
        self.num_steps = 0
        """Steps that the optimizer has taken."""

    def __call__(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        """See `common.training.worker.Worker.train_step`."""
        for observer in self.observers:
            observer.begin(batch, learning_rate, self.num_steps)
        self._prepare(learning_rate)
        loss_sum = self.backward(batch, loss_scale, self.num_steps)
        loss_sum = self.reduction.wait(loss_sum)
        overflowed = self.precision.unless_overflowed(self.optimizer, loss_scale, self._update)
        for observer in self.observers:
            observer.end()
        return StepResult(read_later(loss_sum), overflowed, **self._numbers())

    def _update(self) -> None:
        for observer in self.observers:
            observer.see_averages()
        for change in self.changes:
            change(self.num_steps)
        self.optimizer.step()
        self.num_steps += 1
        for observer in self.observers:
            observer.see_updates()

    def _prepare(self, learning_rate: float) -> None:
        for group, factor in zip(self.optimizer.param_groups, self._factors, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(learning_rate * factor)
            else:
                group["lr"] = learning_rate * factor
        for parameter in self._parameters:
            parameter.grad = None

    def _numbers(self) -> dict[str, SupportsFloat]:
        return {name: read_later(number) for observer in self.observers for name, number in observer.numbers().items()}


def read_later(number: torch.Tensor | float) -> SupportsFloat:
    """Return an object that converts to `number` once a GPU has computed it, or the number itself."""
    return _PendingNumber(number) if isinstance(number, torch.Tensor) and number.is_cuda else number


class _PendingNumber:
    """Number that a GPU is computing; `float()` waits for it, but not for steps that were started later."""

    def __init__(self, number: torch.Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._number)


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
