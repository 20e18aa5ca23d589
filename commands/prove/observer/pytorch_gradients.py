"""Observe gradients in PyTorch from the backward pass to the step: as computed, sent, hooked and clipped."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from allstep.commands.prove.observer.observer import Observer
from allstep.commands.prove.observer.pytorch_models import Models
from allstep.commands.prove.observer.pytorch_values import UnobservableError, is_zero, projected, some_values
from allstep.commands.prove.observer.values import finite, projections
from allstep.commands.prove.records import Gradient, Projections, Sent

_register_hook = torch.Tensor.register_hook  # before it is observed


class Gradients:
    """Gradients of the weights of one process's optimizers since their last steps."""

    def __init__(self, observer: Observer, models: Models) -> None:
        self._observer = observer
        self._models = models
        self._names: dict[int, str] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._frozen: list[torch.Tensor] = []  # of these, without hooks
        self._local: dict[int, Projections | None] = {}
        self._from_backward: set[int] = set()
        self._set: set[int] = set()  # that the script has set itself, and sent
        self._unclipped: dict[int, Projections | None] = {}
        self._by_gradient: dict[int, torch.Tensor] = {}  # parameters by the address of their gradients
        self._losses: list[float | None] = []  # of the backward passes whose gradients add up
        self.is_asked = False  # for gradients that do not add up in .grad
        self.loss_scale = 1.0  # by which losses and gradients are divided, as the script's scaler does
        self.has_stepped = False
        self.is_stepping = False

    def hook(self, parameter: torch.Tensor) -> None:
        """Record the gradients of a parameter before they are reduced."""
        if id(parameter) not in self._hooked:
            self._frozen.append(parameter)
        self._hooked[id(parameter)] = parameter
        self.hook_trained()

    def hook_trained(self) -> None:
        """Hook parameters that are trained from now on; some were frozen when their optimizer was made."""
        for parameter in [one for one in self._frozen if one.requires_grad]:
            add = self._observer.quiet("gradients", functools.partial(self._add_local, parameter))
            _register_hook(parameter, add)
        self._frozen = [one for one in self._frozen if not one.requires_grad]

    def of_others(self) -> list[torch.Tensor]:
        """Return the weights with gradients that no optimizer of this process steps, such as of other ranks' shares."""
        return [one for one in self._models.with_gradients() if id(one) not in self._hooked]

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a gradient that no step has applied."""
        return id(parameter) in self._local or _has_gradient(parameter)

    def of(self, parameter: torch.Tensor) -> Gradient:
        """Return the record of a parameter's gradient, which a step is about to apply."""
        assert parameter.grad is not None
        local, unclipped = self._local.get(id(parameter)), self._unclipped.get(id(parameter))
        applied, is_set = self._projected(parameter.grad), id(parameter) in self._set
        return Gradient(self.name(parameter), local, applied, unclipped, is_set)

    def forget(self, parameter: torch.Tensor) -> None:
        """Forget a gradient that a step has applied."""
        self._local.pop(id(parameter), None)
        self._from_backward.discard(id(parameter))
        self._set.discard(id(parameter))
        self._unclipped.pop(id(parameter), None)

    def _add_local(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._observer.progress.note_backward()
        self._by_gradient.clear()
        self._unclipped.pop(id(parameter), None)
        if id(parameter) in self._set:
            self.forget(parameter)
        was_backward = id(parameter) in self._from_backward
        if self.is_asked and was_backward:
            return  # as in an inner loop (MAML), between the passes of a step
        if not self.is_asked:
            self._from_backward.add(id(parameter))
        new = tuple(value / self.loss_scale for value in self._projected(gradient) or ()) or None
        is_first = parameter.grad is None or is_zero(parameter.grad)  # else a further pass accumulates
        if is_first or not (self.is_asked or was_backward):
            self._local[id(parameter)] = new
            return
        old = self._local.get(id(parameter), (0.0,) * len(new or ()))
        self._local[id(parameter)] = tuple(a + b for a, b in zip(old, new, strict=True)) if old and new else None

    def note_loss(self, loss: torch.Tensor) -> None:
        """Record a loss that backward begins with, as one more of a step where gradients of others are there."""
        parameter = self._hooked.get(next(iter(self._local), 0))
        if parameter is None or not _has_gradient(parameter):
            self._losses.clear()
        self._losses.append(finite(float(loss.detach().to("cpu")) / self.loss_scale))

    def note_sent(self, tensor: Any) -> None:
        """Record the gradients that the script itself sends to be averaged, alone or in one vector."""
        if not isinstance(tensor, torch.Tensor):
            return
        if self._set or not self._local:
            self._note_set(tensor)
            return
        if not self._by_gradient:
            trained = (one for one in self._hooked.values() if one.grad is not None and id(one) in self._local)
            self._by_gradient = {one.grad.data_ptr(): one for one in trained if one.grad is not None}
        trained = list(self._by_gradient.values())
        if (parameter := self._by_gradient.get(tensor.data_ptr())) is not None and parameter.shape == tensor.shape:
            pairs = [(parameter, tensor)]
        elif not (self.is_stepping or self._observer.is_inside) and self._is_vector_of(trained, tensor):
            pairs = self._parts(tensor, trained)  # in a step of an optimizer, it is one of updates
        else:
            return
        for one, gradient in pairs:
            if 2 * len((values := some_values(gradient)).nonzero()) < len(values):
                what = "changes of gradients that are mostly zero when the script sends them"
                self._observer.note_unseen(what, "it may send the largest values only")
                continue
            sent = Sent(self.name(one), self._local[id(one)], self._projected(gradient), self._observer.line())
            self._observer.write(sent)

    def _note_set(self, tensor: torch.Tensor) -> None:
        """Record a gradient that the script has set, such as of an outer step or by torch.func, and sends."""
        for one in self._hooked.values():
            if one.grad is not None and one.grad.data_ptr() == tensor.data_ptr() and id(one) not in self._local:
                self._local[id(one)] = self._projected(one.grad)
                self._set.add(id(one))

    def has_trained(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a weight that has been stepped, or a vector of all of them."""
        weights = [one.detach() for one in self._hooked.values()] if self.has_stepped else []
        if len(weights) > 1 and self._is_vector_of(weights, tensor):
            weights.append(torch.cat([one.reshape(-1) for one in weights]))
        return any(one.shape == tensor.shape and torch.equal(one, tensor) for one in weights)

    @staticmethod
    def _is_vector_of(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> bool:
        return vector.dim() == 1 and len(vector) == sum(one.numel() for one in tensors)

    def _parts(self, vector: torch.Tensor, trained: list[torch.Tensor]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """Return the gradients in a vector, in the order of optimizers or of models; none in another order."""
        orders = [trained, sorted(trained, key=self._models.place_of)]
        gradients = {id(one): one.grad.reshape(-1) for one in trained if one.grad is not None}
        for order in orders:
            pairs = list(zip(order, vector.split([one.numel() for one in order]), strict=True))
            if all(torch.equal(gradients[id(one)], part.to(one.dtype)) for one, part in pairs):
                return pairs
        total = math.fsum(float(one.abs().sum()) for one in gradients.values())
        is_changed = not math.isclose(total, float(vector.abs().sum()), rel_tol=1e-3)
        return pairs if is_changed and list(map(id, orders[0])) == list(map(id, orders[1])) else []

    def around_hook(self, parameter: torch.Tensor, hook: Any) -> Any:
        """Return a hook of the script that also records how it changes a gradient before wrappers average it.

        A hook that multiplies each value by the same number in every step, such as a mask, commutes with the mean.
        """
        line, last = self._observer.line(), torch.full((), torch.nan)
        note = self._observer.quiet("hooks of gradients", self._note_hooked)
        values = self._observer.quiet("hooks of gradients", some_values)

        @functools.wraps(hook)
        def observed(gradient: torch.Tensor) -> Any:
            nonlocal last
            before = values(gradient)
            result = hook(gradient)
            after = values(gradient if result is None else result)
            last = note(parameter, line, before, after, last)
            return result

        return observed

    def _note_hooked(self, parameter: torch.Tensor, line: str, before: Any, after: Any, last: Any) -> torch.Tensor:
        """Record a changed gradient unless its values have the last factors, and return its factors."""
        factors = after / before
        if not torch.isclose(factors, last, rtol=1e-3).logical_or(~(factors - last).isfinite()).all():
            pair = projections(before.numpy()), projections(after.numpy())
            self._observer.write(Sent(self.name(parameter), *pair, line))
        return factors

    def loss(self) -> float | None:
        """Return the sum of the losses of the backward passes whose gradients add up; None if one is unknown."""
        return None if None in self._losses or not self._losses else math.fsum(filter(None, self._losses))

    @property
    def num_passes(self) -> int:
        """Number of backward passes whose gradients add up."""
        return len(self._losses)

    def note_unclipped(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the gradients of parameters that the script clips, of which a mean and a sum may become the same."""
        for one in parameters:
            if one.grad is not None and id(one) in self._local:
                self._unclipped.setdefault(id(one), self._projected(one.grad))

    def name(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, or its number if no model that was called has it."""
        if id(parameter) not in self._names:
            name = self._models.name_of(parameter)
            own = list(self._hooked)
            if name is None:  # the model has not been called yet
                return f"parameter {own.index(id(parameter)) if id(parameter) in own else len(own)}"
            self._names[id(parameter)] = name
        return self._names[id(parameter)]

    def tell_apart(self, parameters: Iterable[torch.Tensor]) -> None:
        """Number the names that several of these parameters have, of several models."""
        counts = Counter[str]()
        for one in parameters:
            counts[name := self.name(one)] += 1
            if counts[name] > 1:
                self._names[id(one)] = f"{name} ({counts[name]})"

    def or_none(self, what: str, function: Any, tensor: torch.Tensor) -> Any:
        """Return what a function returns for a tensor, or None, and note it, where it cannot be observed."""
        try:
            return function(tensor)
        except UnobservableError as error:
            self._observer.note_unseen(what, str(error))
            return None

    def _projected(self, tensor: torch.Tensor) -> Projections | None:
        return self.or_none("gradients of some weights", projected, tensor)


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not is_zero(parameter.grad)
