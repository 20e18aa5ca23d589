"""Observers of training steps: a trace, the noise scale, a moving average. `tensorflow/observer.py` has the same."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from allstep.common.data.loader import Batch
from allstep.common.recipe.noise_scale import is_measured
from allstep.pytorch.compat import move_towards
from allstep.pytorch.kept.network_state import can_train
from allstep.pytorch.optimizers.layers import local, local_gradients


class Observer:
    """Observer of training steps. This base class does nothing; subclasses override what they need."""

    state: Mapping[str, torch.Tensor] = {}
    """State of the observer that a checkpoint keeps, by its names there."""

    def begin(self, batch: Batch, learning_rate: float, num_steps: int) -> None:
        """Begin a step on this rank's share of a global batch, after `num_steps` earlier steps."""

    def in_pass(self, number: int, factor: float) -> contextlib.AbstractContextManager:
        """Return a context around a pass or slice, whose gradient is that of its mean loss times `factor`."""
        return contextlib.nullcontext()

    def see_slice(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """See the gradients that some of the weights have in the slice that is being computed (--slices)."""

    def see_averages(self) -> None:
        """See the averaged gradients of the parameters, before anything changes them."""

    def see_updates(self) -> None:
        """See the weights after the optimizer's update."""

    def numbers(self) -> Mapping[str, torch.Tensor | float]:
        """Return further fields of the step's `StepResult`."""
        return {}

    def end(self) -> None:
        """End the step, which may have had no update."""

    def exchange_weights(self) -> None:
        """Exchange the network's weights and their moving averages, if the observer has any."""

    def kept(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the names in `state` after the first step, each with a tensor of the same shape and device."""
        return ()


@contextlib.contextmanager
def observed(observers: Sequence[Observer], number: int, factor: float) -> Iterator[None]:
    """Enter `Observer.in_pass` of all observers."""
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.in_pass(number, factor))
        yield


class GradientSquares(Observer):
    """Squares of the norms of gradients; `tensorflow/observer.py` has the same.

    Hooks read the gradients of a pass before they are added to those of other passes, and before Horovod or DDP reduces
    them in place.
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
            self._average = _square([_norm(one) for one in local_gradients(self._parameters)])

    def numbers(self) -> Mapping[str, torch.Tensor | float]:
        squares = torch.stack(self._squares).sum() if self._squares else 0.0
        return {"squares_of_parts": squares, "square_of_average": self._average}

    def _see(self, gradient: torch.Tensor) -> None:
        if self._norms is not None:
            self._norms.append(_norm(gradient))


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    # torch 2.11 does not accept sparse tensors.
    return torch.linalg.vector_norm(gradient.coalesce().values() if gradient.is_sparse else gradient)


def _square(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the square of the norm of all weights together, in float64."""
    return torch.stack(norms).double().square().sum()


class WeightAverage(Observer):
    """a = w after the first step, a = decay * a + (1 - decay) * w after each other one (Polyak and Juditsky 1992).

    Running statistics of batch norms are not averaged: they are averages.
    """

    def __init__(self, network: torch.nn.Module, decay: float) -> None:
        parameters = {name: one for name, one in network.named_parameters() if can_train(one)}
        self._all = {f"ema/{name}": parameter for name, parameter in parameters.items()}
        self._own = {name: parameter for name, parameter in self._all.items() if not parameter.is_meta}
        self._decay = decay
        self.state: dict[str, torch.Tensor] = {}

    def kept(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._all.items()

    def see_updates(self) -> None:
        if not self.state:
            self.state = {name: parameter.detach().clone() for name, parameter in self._own.items()}
            return
        averages, weights = local(self.state.values()), local(self._own.values())
        move_towards(averages, [weight.detach() for weight in weights], 1 - self._decay)

    @torch.no_grad()
    def exchange_weights(self) -> None:
        for name, parameter in self._own.items():
            [weight], [average] = local([parameter]), local([self.state[name]])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
