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
        self._of_parts: list[torch.Tensor] = []
        self._of_average: torch.Tensor | None = None
        self._measures = False
        for parameter in self._parameters:
            parameter.register_hook(self._see)

    def begin_step(self, *, measures: bool) -> None:
        """Forget the step before; look at this one where it is to be measured."""
        self._measures, self._of_parts, self._of_average = measures, [], None

    @contextlib.contextmanager
    def of_part(self, factor: float) -> Iterator[None]:
        """Within it, a backward pass gives the gradient of the mean loss of a part times `factor`; 0 has no samples."""
        self._norms = [] if self._measures and factor else None
        yield
        if self._norms:
            self._of_parts.append(_square(self._norms) / factor**2)
        self._norms = None

    def see_average(self) -> None:
        """Look at the averaged gradients, before they are changed."""
        if self._measures:
            self._of_average = _square([torch.linalg.vector_norm(one) for one in local_gradients(self._parameters)])

    @property
    def of_parts(self) -> torch.Tensor | float:
        """The sum over the parts of this step."""
        return torch.stack(self._of_parts).sum() if self._of_parts else 0.0

    @property
    def of_average(self) -> torch.Tensor | float:
        """Of the averaged gradient."""
        return 0.0 if self._of_average is None else self._of_average

    def _see(self, gradient: torch.Tensor) -> None:
        if self._norms is not None:
            self._norms.append(torch.linalg.vector_norm(gradient))


def _square(norms: list[torch.Tensor]) -> torch.Tensor:
    """Of the norm of all weights together, in float64."""
    return torch.stack(norms).double().square().sum()
