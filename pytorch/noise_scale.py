"""What the gradient noise scale needs of a step: the norms of gradients of passes, and of their average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from allstep.common.data.loader import Batch
from allstep.common.recipe.noise_scale import is_measured
from allstep.pytorch.observer import Observer
from allstep.pytorch.optimizers.layers import local_gradients


class GradientSquares(Observer):
    """Squares of the norms of gradients; `tensorflow/noise_scale.py` has the same.

    A pass's gradient of a weight is read when backward hands it out: before it is added to those of other passes, and
    before Horovod or DDP sends it, which they do in place.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters, self._with_hooks = list(parameters), set[torch.nn.Parameter]()
        self._norms: list[torch.Tensor] | None = None
        self._measures = False

    def begin(self, batch: Batch, learning_rate: float, num_steps: int) -> None:
        self._measures, self._squares, self._average = is_measured(num_steps + 1), list[torch.Tensor](), 0.0
        if self._measures:
            for parameter in self._parameters:
                if parameter.requires_grad and parameter not in self._with_hooks:
                    self._with_hooks.add(parameter)
                    parameter.register_hook(self._see)

    @contextlib.contextmanager
    def in_pass(self, number: int, factor: float) -> Iterator[None]:
        self._norms = [] if self._measures and factor else None
        yield
        if self._norms:
            self._squares.append(_square(self._norms) / factor**2)
        self._norms = None

    def see_averages(self) -> None:
        if self._measures:
            self._average = _square([torch.linalg.vector_norm(one) for one in local_gradients(self._parameters)])

    def numbers(self) -> Mapping[str, torch.Tensor | float]:
        squares = torch.stack(self._squares).sum() if self._squares else 0.0
        return {"squares_of_parts": squares, "square_of_average": self._average}

    def _see(self, gradient: torch.Tensor) -> None:
        if self._norms is not None:
            self._norms.append(torch.linalg.vector_norm(gradient))


def _square(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the square of the norm of all weights together, in float64."""
    return torch.stack(norms).double().square().sum()
