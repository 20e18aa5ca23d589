"""Observes optimizers of PyTorch: gradients as backward makes them and as they are applied, weights, slots, rates."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from allstep.commands.prove.observer.observer import Observer, replace, replace_everywhere
from allstep.commands.prove.observer.pytorch_models import Models, bytes_of
from allstep.commands.prove.observer.values import digest, finite, projections, stride
from allstep.commands.prove.records import EarlyClip, Gradient, Projections, Step

IS_PARTIAL = "_allstep_is_partial"
"""The attribute by which an optimizer is known to step a weight alone, on the way to its whole step."""


class Optimizers:
    """Of one process."""

    def __init__(self, observer: Observer, models: Models) -> None:
        self._observer = observer
        self._models = models
        self._names: dict[int, str] = {}
        self._hooked: dict[int, torch.Tensor] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._local: dict[int, Projections | None] = {}
        self._num_steps: dict[int, int] = {}  # by optimizer
        self._pending: Step | None = None
        self.loss: float | None = None

    def hook_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Have backward show the gradients of an optimizer's parameters, before they are reduced."""
        self._optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._hooked:
                    self._hooked[id(parameter)] = parameter
                    parameter.register_hook(functools.partial(self._add_local, id(parameter)))

    def _add_local(self, key: int, gradient: torch.Tensor) -> None:
        new = _projections(gradient)
        old = self._local.get(key, (0.0,) * len(new or ()))
        self._local[key] = tuple(a + b for a, b in zip(old, new, strict=True)) if old and new else None

    def before_change(self, what: str) -> None:
        """Write down a change of gradients that Horovod still averages: its wrapper keeps a handle of each.

        It is None in a pass that only accumulates.
        """
        kept = [pair for optimizer in self._optimizers for pair in getattr(optimizer, "_handles", {}).values()]
        if any(handle is not None for handle, _ in kept):
            self._observer.write(EarlyClip(what, self._observer.num_steps_seen + 1, self._observer.line()))

    def before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Look at what is about to be applied. Where a wrapper's step calls its optimizer's, the last look counts."""
        if vars(optimizer).get(IS_PARTIAL):
            return
        number = self._num_steps.get(id(optimizer), 0) + 1
        order = [*self._num_steps, id(optimizer)]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        looks_at_weights = number == 1 or self._observer.num_steps_seen == self._observer.num_steps - 1
        first = next((parameter for parameter in parameters), None)
        before = getattr(optimizer, "_starting_models", {})  # of Adasum's wrapper, in which each rank has stepped
        self._pending = Step(
            number=number,
            optimizer=order.index(id(optimizer)) + 1,
            loop=self._observer.num_loops,
            kind=type(optimizer).__name__,
            is_wrapped=hasattr(optimizer, "skip_synchronize"),  # of Horovod's classes alone
            learning_rates=tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group),
            gradients=tuple(self._gradient(one) for one in parameters if one.requires_grad and one.grad is not None),
            weights={self._name(one): digest(bytes_of(before.get(one, one))) for one in parameters}
            if looks_at_weights
            else {},
            state=self._slots(optimizer) if number == 1 and not before else {},
            loss=self.loss,
            device=_device(first),
            line=self._observer.line(),
        )

    def after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        """Write it down, once."""
        step, self._pending = self._pending, None
        if step is None:
            return
        self._num_steps[id(optimizer)] = step.number
        self._local.clear()
        self._observer.write(step)
        if self._observer.end_step():
            self._observer.stop()

    def _gradient(self, parameter: torch.Tensor) -> Gradient:
        assert parameter.grad is not None
        return Gradient(self._name(parameter), self._local.get(id(parameter)), _projections(parameter.grad))

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names:
            name = self._models.name_of(parameter)
            self._names[id(parameter)] = name or f"parameter {list(self._hooked).index(id(parameter))}"
        return self._names[id(parameter)]

    def _slots(self, optimizer: torch.optim.Optimizer) -> dict[str, str]:
        return {
            f"{self._name(parameter)}.{name}": digest(bytes_of(value))
            for parameter, slots in optimizer.state.items()
            for name, value in slots.items()
            if isinstance(value, torch.Tensor)
        }


def install(observer: Observer, models: Models) -> None:
    """Hook every optimizer that is made from now on."""
    optimizers = Optimizers(observer, models)

    def wrap_group(add_group: Any) -> Any:
        @functools.wraps(add_group)
        def observed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            add_group(optimizer, *args, **kwargs)
            optimizers.hook_parameters(optimizer)

        return observed

    def wrap_backward(backward: Any) -> Any:
        @functools.wraps(backward)
        def observed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:
                optimizers.loss = finite(float(tensor.detach().to("cpu")))
            with observer.waiting("the backward pass", computes=True):
                return backward(tensor, *args, **kwargs)

        return observed

    def wrap_clip(clip: Any) -> Any:
        @functools.wraps(clip)
        def observed(*args: Any, **kwargs: Any) -> Any:
            optimizers.before_change("clipped")
            return clip(*args, **kwargs)

        return observed

    def wrap_unscale(unscale: Any) -> Any:
        @functools.wraps(unscale)
        def observed(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> None:
            if scaler.is_enabled():
                optimizers.before_change("unscaled")
            unscale(scaler, *args, **kwargs)

        return observed

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        replace_everywhere("torch.nn.utils", clip_grad, name, wrap_clip)
    replace(torch.amp.GradScaler, "unscale_", wrap_unscale)
    replace(torch.optim.Optimizer, "add_param_group", wrap_group)
    replace(torch.Tensor, "backward", wrap_backward)
    register_optimizer_step_pre_hook(optimizers.before_step)
    register_optimizer_step_post_hook(optimizers.after_step)


def _projections(gradient: torch.Tensor) -> Projections | None:
    with torch.no_grad():
        values = (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
        return projections(values[:: stride(len(values))].float().to("cpu").numpy())


def _device(parameter: torch.Tensor | None) -> str:
    """Which device it is, over the processes of a host."""
    if parameter is None or not parameter.is_cuda:
        return "cpu"
    return str(torch.cuda.get_device_properties(parameter.device).uuid)
