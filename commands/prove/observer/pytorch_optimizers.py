"""Observe optimizers of PyTorch: gradients as applied, weights, slots and learning rates."""

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace as replace_field
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from allstep.commands.prove.observer.guarding import Arguments
from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_gradients import Gradients
from allstep.commands.prove.observer.pytorch_models import Models, Wrappers
from allstep.commands.prove.observer.pytorch_values import bytes_of, some_bytes
from allstep.commands.prove.observer.pytorch_variables import note_variables
from allstep.commands.prove.observer.values import digest, finite
from allstep.commands.prove.records import APPLIED, BACKWARD, SHARED, EarlyChange, Step, Wrapped

IS_PARTIAL = "_allstep_is_partial"
"""Attribute that marks an optimizer while it steps a single weight, as a part of its whole step."""
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
"""Module of ZeroRedundancyOptimizer, which is slow to import; a script with such an optimizer has imported it."""


class Optimizers:
    """Optimizers of one process."""

    def __init__(self, observer: Observer, models: Models, wrappers: Wrappers) -> None:
        self._observer = observer
        self.gradients = Gradients(observer, models)
        self._wrappers = wrappers
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._num_steps: dict[int, int] = {}  # by optimizer
        self._pending: Step | None = None
        self._outer: torch.optim.Optimizer | None = None
        self._note_variables = observer.quiet("variables of the script", note_variables)

    def hook_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks that record the gradients of an optimizer's parameters before they are reduced."""
        self._optimizers[id(optimizer)] = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.gradients.hook(parameter)

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
        """Keep the gradients of parameters that the script clips."""
        self.before_change("clipped")
        self.gradients.note_unclipped(parameters)

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
        gradients = self.gradients
        whole = [one for one in parameters if not self._wrappers.is_sharded(one)]
        sharded = [gradients.name(one) for one in parameters if self._wrappers.is_sharded(one)]
        has_closure = any(map(callable, (*args, *kwargs.values())))
        if not (sharded or has_closure or any(map(gradients.is_new, whole))):
            return None  # it only makes slots, as Horovod's broadcast does on ranks without a checkpoint
        self._outer = optimizer if _is_zero_redundancy(optimizer) else None
        number = self._num_steps.get(id(optimizer), 0) + 1
        # Horovod's wrapper waits in its own step, unless it is told not to.
        waits = getattr(optimizer, "_should_synchronize", False)
        if not waits and not {*map(id, self._on_their_way())}.isdisjoint(map(id, parameters)):
            self._observer.write(EarlyChange(APPLIED, number, self._observer.line()))
        order = [*self._num_steps, id(optimizer)]
        gradients.tell_apart(parameters)
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
            gradients=tuple(gradients.of(one) for one in whole if one.grad is not None),
            weights=self._digests({one: before.get(one, one) for one in whole}, is_whole=number == 1),
            state=self._slots(optimizer) if looks_at_state else {},
            loss=gradients.loss(),
            num_passes=gradients.num_passes,
            device=_device(next(iter(parameters), None)),
            line=self._observer.line(),
            wrapper=wrapper,
            num_unwrapped=num_unwrapped,
            bypass=self._wrappers.bypass_of(parameters),
            sharded=tuple(sharded),
            others=self._digests({one: one for one in gradients.of_others()}, is_whole=number == 1),
        )
        gradients.is_stepping = True
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
        self.gradients.is_stepping = False
        if step is None:
            return
        changed = (one for group in optimizer.param_groups for one in group["params"] if one.grad is not None)
        if (first := next(changed, None)) is not None and step.number > 1 and not step.sharded:
            step = replace_field(step, after=self._digests({first: first}, is_whole=False))
        self._num_steps[id(optimizer)] = step.number
        self.gradients.has_stepped = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.gradients.forget(parameter)
        self._observer.write(step)
        if step.optimizer == 1:
            self._note_variables(self._observer)
        size = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
        if self._observer.progress.end_step(0, step.optimizer, (bool(step.wrapper), size)):
            self._observer.stop()

    def _digests(self, weights: dict[torch.Tensor, torch.Tensor], *, is_whole: bool) -> dict[str, str]:
        """Return digests of weights: of all values, or of some, which costs little in every step."""
        of = bytes_of if is_whole else some_bytes
        values = {
            self.gradients.name(one): self.gradients.or_none("some weights", of, weight)
            for one, weight in weights.items()
        }
        return {name: digest(value) for name, value in values.items() if value is not None}

    def _slots(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        slots = {
            f"{self.gradients.name(parameter)}.{name}": self.gradients.or_none(
                "some states of the optimizer", bytes_of, value
            )
            for parameter, slots in optimizer.state.items()
            if isinstance(slots, dict)
            for name, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        return {name: digest(value) for name, value in slots.items() if value is not None}


def install(observer: Observer, models: Models, wrappers: Wrappers) -> Optimizers:
    """Hook every optimizer that is made from now on."""
    optimizers = Optimizers(observer, models, wrappers)
    gradients = optimizers.gradients

    def observe_group(optimizer: torch.optim.Optimizer, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        yield
        optimizers.hook_parameters(optimizer)

    def observe_backward(tensor: Any, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        gradients.hook_trained()
        losses: Sequence[Any] = tensor if isinstance(tensor, (list, tuple)) else [tensor]
        if losses and isinstance(losses[0], torch.Tensor) and losses[0].numel() == 1 and not observer.is_inside:
            gradients.note_loss(losses[0])
        with observer.waiting(BACKWARD, computes=True):
            yield

    def observe_grad(*_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        gradients.hook_trained()
        gradients.is_asked = True
        try:
            yield
        finally:
            gradients.is_asked = False

    before_clip = observer.quiet("clipping", optimizers.before_clip)

    def observe_clip(parameters: Any, *args: Any, **kwargs: Any) -> Generator[Arguments, Any, None]:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)  # of a generator
        before_clip(parameters)
        yield (parameters, *args), kwargs

    def observe_hook(tensor: torch.Tensor, hook: Any) -> Generator[Arguments, Any, None]:
        yield (tensor, gradients.around_hook(tensor, hook) if isinstance(tensor, torch.nn.Parameter) else hook), {}

    def observe_scale(scaler: torch.amp.GradScaler, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        yield
        gradients.loss_scale = scaler.get_scale()

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


def _device(parameter: torch.Tensor | None) -> str:
    """Return a name of the parameter's device that is the same in all processes of a host."""
    if parameter is None or not parameter.is_cuda:
        return "cpu"
    return str(torch.cuda.get_device_properties(parameter.device).uuid)
