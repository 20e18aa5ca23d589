"""Observers of training steps: a trace, the noise scale, a moving average. `tensorflow/observer.py` has the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from allstep.common.data.loader import Batch


class Observer:
    """Looks at a training step at five moments. This base class does nothing at any of them."""

    state: Mapping[str, torch.Tensor] = {}
    """State of the observer that a checkpoint keeps, by its names there."""

    def begin(self, batch: Batch, learning_rate: float, num_steps: int) -> None:
        """A step begins on this rank's share of a global batch, after `num_steps` steps."""

    def in_pass(self, number: int, factor: float) -> contextlib.AbstractContextManager:
        """Within it, backward computes the gradient of a pass's, or a slice's, mean loss times `factor`."""
        return contextlib.nullcontext()

    def see_slice(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """See the gradients that some of the weights have in the slice that is being computed (--slices)."""

    def see_averages(self) -> None:
        """The parameters have the averaged gradients, before anything changes these."""

    def see_updates(self) -> None:
        """The optimizer has changed the weights."""

    def numbers(self) -> Mapping[str, torch.Tensor | float]:
        """Fields of the step's `StepResult`."""
        return {}

    def end(self) -> None:
        """The step is over, with or without an update."""

    def averaged_weights(self) -> contextlib.AbstractContextManager:
        """Within it the network has moving averages, and these are where its weights were."""
        return contextlib.nullcontext()

    def kept(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The names that `state` has after the first step, each with a tensor of the same shape and placement."""
        return ()


@contextlib.contextmanager
def observed(observers: Sequence[Observer], number: int, factor: float) -> Iterator[None]:
    """Within it, all observers see a pass; see `Observer.in_pass`."""
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.in_pass(number, factor))
        yield
