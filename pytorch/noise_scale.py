"""What the gradient noise scale needs of a step: the norms of the parts' gradients, and of their average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from allstep.pytorch.optimizers.layers import local_gradients


class GradientSquares:
    """Squares of the norms of gradients; `noise_scale` of `tensorflow/` has the same.

    A pass's gradient of a weight is looked at when backward hands it out: before it is added to those of other passes,
    and before Horovod or DDP sends it, which they do in place.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._norms: list[torch.Tensor] | None = None
        self._parts: list[torch.Tensor] = []
        self._average: torch.Tensor | None = None
        self._measures = False
        for parameter in self._parameters:
            parameter.register_hook(self._see)

    def begin_step(self, *, measures: bool) -> None:
        """Forget the step before; look at this one where it is to be measured."""
        self._measures, self._parts, self._average = measures, [], None

    @contextlib.contextmanager
    def see_part(self, factor: float) -> Iterator[None]:
        """Within it, backward gives the gradient of a part's mean loss times `factor`, which is 0 without samples."""
        self._norms = [] if self._measures and factor else None
        yield
        if self._norms:
            self._parts.append(_square(self._norms) / factor**2)
        self._norms = None

    def see_average(self) -> None:
        """Look at the averaged gradients, before they are changed."""
        if self._measures:
            self._average = _square([torch.linalg.vector_norm(one) for one in local_gradients(self._parameters)])

    @property
    def sum_over_parts(self) -> torch.Tensor | float:
        """Squares of the norms of the parts' gradients of this step, added up."""
        return torch.stack(self._parts).sum() if self._parts else 0.0

    @property
    def average(self) -> torch.Tensor | float:
        """The square of the norm of the averaged gradient."""
        return 0.0 if self._average is None else self._average

    def _see(self, gradient: torch.Tensor) -> None:
        if self._norms is not None:
            self._norms.append(torch.linalg.vector_norm(gradient))


def _square(norms: list[torch.Tensor]) -> torch.Tensor:
    """Of the norm of all weights together, in float64."""
    return torch.stack(norms).double().square().sum()
