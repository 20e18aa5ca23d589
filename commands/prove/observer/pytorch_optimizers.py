"""Observe optimizers of PyTorch: gradients as computed and as applied, weights, slots and learning rates."""

import functools
import math
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace as replace_field
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from allstep.commands.prove.observer.guarding import Arguments
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_models import Models, Wrappers
from allstep.commands.prove.observer.pytorch_values import (
    UnobservableError,
    bytes_of,
    is_zero,
    note_variables,
    projected,
    some_bytes,
    some_values,
)
from allstep.commands.prove.observer.values import digest, finite, projections
from allstep.commands.prove.records import (
    APPLIED,
    BACKWARD,
    SHARED,
    EarlyChange,
    Gradient,
    Projections,
    Sent,
    Step,
    Wrapped,
)

_register_hook = torch.Tensor.register_hook  # before it is observed
IS_PARTIAL = "_allstep_is_partial"
"""Attribute that marks an optimizer while it steps a single weight, as a part of its whole step."""
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
"""Module of ZeroRedundancyOptimizer, which is slow to import; a script with such an optimizer has imported it."""


class Optimizers:
    """Optimizers of one process."""

    def __init__(self, observer: Observer, models: Models, wrappers: Wrappers) -> None:
        self._observer = observer
        self._models = models
        self._wrappers = wrappers
        self._names: dict[int, str] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._local: dict[int, Projections | None] = {}
        self._from_backward: set[int] = set()
        self.is_asked = False  # for gradients that do not add up in .grad
        self._unclipped: dict[int, Projections | None] = {}
        self._num_steps: dict[int, int] = {}  # by optimizer
        self._pending: Step | None = None
        self.loss_scale = 1.0  # by which losses and gradients are divided, as the script's scaler does
        self._outer: torch.optim.Optimizer | None = None
        self._by_gradient: dict[int, torch.Tensor] = {}  # parameters by the address of their gradients
        self._losses: list[float | None] = []  # of the backward passes whose gradients add up
        self._note_variables = observer.quiet("variables of the script", note_variables)

    def hook_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks that record the gradients of an optimizer's parameters before they are reduced."""
        self._optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked[id(parameter)] = parameter
                    add = self._observer.quiet("gradients", functools.partial(self._add_local, parameter))
                    _register_hook(parameter, add)

    def _add_local(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._observer.progress.note_backward()
        self._by_gradient.clear()
        self._unclipped.pop(id(parameter), None)
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
        if not isinstance(tensor, torch.Tensor) or not self._local:
            return
        if not self._by_gradient:
            trained = (one for one in self._hooked.values() if one.grad is not None and id(one) in self._local)
            self._by_gradient = {one.grad.data_ptr(): one for one in trained if one.grad is not None}
        trained = list(self._by_gradient.values())
        if (parameter := self._by_gradient.get(tensor.data_ptr())) is not None and parameter.shape == tensor.shape:
            pairs = [(parameter, tensor)]
        elif self._pending is None and not self._observer.is_inside and self._is_vector_of(trained, tensor):
            pairs = self._parts(tensor, trained)  # in a step of an optimizer, it is one of updates
        else:
            return
        for one, gradient in pairs:
            if 2 * len((values := some_values(gradient)).nonzero()) < len(values):
                what = "changes of gradients that are mostly zero when the script sends them"
                self._observer.note_unseen(what, "it may send the largest values only")
                continue
            sent = Sent(self._name(one), self._local[id(one)], self._projected(gradient), self._observer.line())
            self._observer.write(sent)

    def has_trained(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a weight that has been stepped, or a vector of all of them."""
        weights = [one.detach() for one in self._hooked.values()] if self._num_steps else []
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
            self._observer.write(Sent(self._name(parameter), *pair, line))
        return factors

    def before_inplace(self, tensor: torch.Tensor) -> None:
        """Record a change of a gradient in place, if Horovod still averages it."""
        if self._observer.is_inside:
            return
        gradients = (one.grad for one in self._on_their_way())
        is_sent = any(one is not None and one.data_ptr() == tensor.data_ptr() for one in gradients)
        if is_sent and (line := self._observer.line()):
            self._observer.write(EarlyChange("changed", self._observer.progress.num_steps + 1, line))

    def before_change(self, what: str) -> None:
        """Record a change of gradients while Horovod still averages some."""
        if any(True for _ in self._on_their_way()):
            self._observer.write(EarlyChange(what, self._observer.progress.num_steps + 1, self._observer.line()))

    def before_clip(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keep the gradients of parameters that the script clips, of which a mean and a sum may become the same."""
        self.before_change("clipped")
        for one in parameters:
            if one.grad is not None and id(one) in self._local:
                self._unclipped.setdefault(id(one), self._projected(one.grad))

    def _on_their_way(self) -> Iterator[torch.Tensor]:
        """Yield the parameters whose gradients Horovod still averages, of which its wrapper keeps handles.

        A handle is None in a pass that only accumulates.
        """
        for optimizer in self._optimizers.values():
            for parameters, (handle, _) in getattr(optimizer, "_handles", {}).items():
                if handle is not None:
                    yield from parameters if isinstance(parameters, tuple) else (parameters,)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Arguments | None:
        """Prepare the record of a step. If a wrapper's step calls its optimizer's, the last call counts.

        ZeroRedundancyOptimizer counts itself, since the optimizer in it has a share of the weights.
        """
        if vars(optimizer).get(IS_PARTIAL) or self._outer is not None:
            return None
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        whole = [one for one in parameters if not self._wrappers.is_sharded(one)]
        sharded = [self._name(one) for one in parameters if self._wrappers.is_sharded(one)]
        has_closure = any(map(callable, (*args, *kwargs.values())))
        if not (sharded or has_closure or any(id(one) in self._local or _has_gradient(one) for one in whole)):
            return None  # it only makes slots, as Horovod's broadcast does on ranks without a checkpoint
        self._outer = optimizer if _is_zero_redundancy(optimizer) else None
        number = self._num_steps.get(id(optimizer), 0) + 1
        # Horovod's wrapper waits in its own step, unless it is told not to.
        waits = getattr(optimizer, "_should_synchronize", False)
        if not waits and not {*map(id, self._on_their_way())}.isdisjoint(map(id, parameters)):
            self._observer.write(EarlyChange(APPLIED, number, self._observer.line()))
        order, counts = [*self._num_steps, id(optimizer)], Counter[str]()
        for one in parameters:  # of several models
            counts[name := self._name(one)] += 1
            if counts[name] > 1:
                self._names[id(one)] = f"{name} ({counts[name]})"
        if number == 1 and any(one.is_shared() for one in whole if not one.is_cuda):
            self._observer.write(Wrapped("share_memory", self._observer.line(), SHARED))
        if sharded:
            self._observer.note_unseen("sharded weights, gradients and states", "each rank has a shard")
        before = getattr(optimizer, "_starting_models", {})  # of Adasum's wrapper, whose ranks have already stepped
        wrapper, num_unwrapped = self._wrappers.line_of(parameters)
        looks_at_state = number == 1 and not before and self._outer is None and not sharded
        self._pending = Step(
            number=number,
            optimizer=order.index(id(optimizer)) + 1,
            loop=self._observer.progress.loop,
            kind=type(optimizer).__name__,
            is_wrapped=hasattr(optimizer, "skip_synchronize"),  # only Horovod's classes have it
            learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            gradients=tuple(self._gradient(one) for one in whole if one.grad is not None),
            weights=self._digests({one: before.get(one, one) for one in whole}, is_whole=number == 1),
            state=self._slots(optimizer) if looks_at_state else {},
            loss=None if None in self._losses or not self._losses else math.fsum(filter(None, self._losses)),
            num_passes=len(self._losses),
            device=_device(next(iter(parameters), None)),
            line=self._observer.line(),
            wrapper=wrapper,
            num_unwrapped=num_unwrapped,
            bypass=self._wrappers.bypass_of(parameters),
            sharded=tuple(sharded),
        )
        if has_closure and optimizer.param_groups[0].get("line_search_fn"):
            return tuple(self._noting_loss(one) for one in args), {k: self._noting_loss(v) for k, v in kwargs.items()}
        return None

    def _noting_loss(self, closure: Any) -> Any:
        """Return a closure that also notes the first loss that it returns in a step, if it is a closure."""
        note = self._observer.quiet("losses of closures", self._note_closure)

        def observed() -> Any:
            loss = closure()
            note(loss)
            return loss

        return observed if callable(closure) else closure

    def _note_closure(self, loss: Any) -> None:
        if self._pending and self._pending.closure_loss is None:
            self._pending = replace_field(self._pending, closure_loss=finite(float(loss)))

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Write the record of the step, once."""
        if self._outer is not None and self._outer is not optimizer:
            return
        step, self._pending, self._outer = self._pending, None, None
        if step is None:
            return
        changed = (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)
        if (first := next(changed, None)) is not None and step.number > 1 and not step.sharded:
            step = replace_field(step, after=self._digests({first: first}, is_whole=False))
        self._num_steps[id(optimizer)] = step.number
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._local.pop(id(parameter), None)
                self._from_backward.discard(id(parameter))
                self._unclipped.pop(id(parameter), None)
        self._observer.write(step)
        if step.optimizer == 1:
            self._note_variables(self._observer)
        size = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
        if self._observer.progress.end_step(0, step.optimizer, (bool(step.wrapper), size)):
            self._observer.stop()

    def _gradient(self, parameter: torch.Tensor) -> Gradient:
        assert parameter.grad is not None
        local, unclipped = self._local.get(id(parameter)), self._unclipped.get(id(parameter))
        return Gradient(self._name(parameter), local, self._projected(parameter.grad), unclipped)

    def _projected(self, tensor: torch.Tensor) -> Projections | None:
        return self._or_none("gradients of some weights", projected, tensor)

    def _or_none(self, what: str, function: Any, tensor: torch.Tensor) -> Any:
        try:
            return function(tensor)
        except UnobservableError as error:
            self._observer.note_unseen(what, str(error))
            return None

    def _digests(self, weights: dict[torch.Tensor, torch.Tensor], *, is_whole: bool) -> dict[str, str]:
        """Return digests of weights: of all values, or of some, which costs little in every step."""
        of = bytes_of if is_whole else some_bytes
        values = {self._name(one): self._or_none("some weights", of, weight) for one, weight in weights.items()}
        return {name: digest(value) for name, value in values.items() if value is not None}

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names:
            name = self._models.name_of(parameter)
            own = list(self._hooked)
            if name is None:  # the model has not been called yet
                return f"parameter {own.index(id(parameter)) if id(parameter) in own else len(own)}"
            self._names[id(parameter)] = name
        return self._names[id(parameter)]

    def _slots(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        slots = {
            f"{self._name(parameter)}.{name}": self._or_none("some states of the optimizer", bytes_of, value)
            for parameter, slots in optimizer.state.items()
            if isinstance(slots, dict)
            for name, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        return {name: digest(value) for name, value in slots.items() if value is not None}


def install(observer: Observer, models: Models, wrappers: Wrappers) -> Optimizers:
    """Hook every optimizer that is made from now on."""
    optimizers = Optimizers(observer, models, wrappers)

    def observe_group(optimizer: torch.optim.Optimizer, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        yield
        optimizers.hook_parameters(optimizer)

    def observe_backward(tensor: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        losses: Sequence[Any] = tensor if isinstance(tensor, (list, tuple)) else [tensor]
        if losses and isinstance(losses[0], torch.Tensor) and losses[0].numel() == 1 and not observer.is_inside:
            optimizers.note_loss(losses[0])
        with observer.waiting(BACKWARD, computes=True):
            yield

    def observe_grad(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        optimizers.is_asked = True
        try:
            yield
        finally:
            optimizers.is_asked = False

    before_clip = observer.quiet("clipping", optimizers.before_clip)

    def observe_clip(parameters: Any, *args: Any, **kwargs: Any) -> Generator[Arguments, Any, None]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)  # of a generator
        before_clip(parameters)
        yield (parameters, *args), kwargs

    def observe_hook(tensor: torch.Tensor, hook: Any) -> Generator[Arguments, Any, None]:
        yield (tensor, optimizers.around_hook(tensor, hook) if isinstance(tensor, torch.nn.Parameter) else hook), {}

    def observe_scale(scaler: torch.amp.GradScaler, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        yield
        optimizers.loss_scale = scaler.get_scale()

    def observe_unscale(scaler: torch.amp.GradScaler, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        if scaler.is_enabled():
            optimizers.before_change("unscaled")
        yield

    observer.watch_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, "step")
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replace_everywhere("torch.nn.utils", clip_grad, name, observer.around("clipping", observe_clip))
    replace(torch.amp.GradScaler, "scale", observer.around("scaled losses", observe_scale))
    replace(torch.amp.GradScaler, "unscale_", observer.around("scaled gradients", observe_unscale))
    replace(torch.optim.Optimizer, "add_param_group", observer.around("optimizers", observe_group))
    replace(torch.Tensor, "register_hook", observer.around("hooks of gradients", observe_hook))
    replace(torch.Tensor, "backward", observer.around("backward passes", observe_backward))
    replace(torch.autograd, "grad", observer.around("gradients", observe_grad))
    replace(torch.autograd, "backward", observer.around("backward passes", observe_backward))
    register_optimizer_step_pre_hook(observer.quiet("steps of optimizers", optimizers.before_step))
    register_optimizer_step_post_hook(observer.quiet("steps of optimizers", optimizers.after_step))
    return optimizers


def _is_zero_redundancy(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, getattr(sys.modules.get(_ZERO), "ZeroRedundancyOptimizer", ()))


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not is_zero(parameter.grad)


def _device(parameter: torch.Tensor | None) -> str:
    """Return a name of the parameter's device that is the same in all processes of a host."""
    if parameter is None or not parameter.is_cuda:
        return "cpu"
    return str(torch.cuda.get_device_properties(parameter.device).uuid)
