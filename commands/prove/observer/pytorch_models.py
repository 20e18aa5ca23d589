"""Observes calls of models in PyTorch: their samples, whether they train, random numbers, running statistics."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.values import digest, row_digests
from allstep.commands.prove.records import Forward, HostCopy


class Models:
    """Of one process; of a model that calls others, only the outermost call counts."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._depth = threading.local()
        self._called: list[torch.nn.Module] = []

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a parameter in the models that have been called."""
        for model in self._called:
            for name, own in model.named_parameters():
                if own is parameter:
                    return name.removeprefix("module.")
        return None

    def wrap_call(self, call: Any) -> Any:
        """`Module.__call__` that is observed."""

        @functools.wraps(call)
        def observed(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._depth, "is_inside", False) or next(module.parameters(), None) is None:
                return call(module, *args, **kwargs)
            self._depth.is_inside = True
            try:
                return self._observe(call, module, args, kwargs)
            finally:
                self._depth.is_inside = False

        return observed

    def _observe(self, call: Any, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        observer = self._observer
        if not any(module is known for known in self._called):
            self._called.append(module)
        is_training = module.training and torch.is_grad_enabled()
        before = _random_state()
        with observer.waiting("the model", computes=True):
            outputs = call(module, *args, **kwargs)
        inputs = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.dim()), None)
        observer.write(
            Forward(
                step=observer.num_steps_seen + 1,
                loop=observer.num_loops,
                is_training=is_training,
                rows=() if inputs is None else row_digests(bytes_of(inputs)),
                random_state=before if _random_state() != before else None,
                batch_norm={} if is_training else dict(_running_statistics(module)),
                bypasses=self._wrapper_of(module),
                line=observer.line(),
            )
        )
        return outputs

    def _wrapper_of(self, module: torch.nn.Module) -> str | None:
        return "DistributedDataParallel" if any(module is inner for inner in _held_by_ddp) else None


_held_by_ddp: list[torch.nn.Module] = []


def hold(wrapper: DistributedDataParallel) -> None:
    """Remember the model that a wrapper holds."""
    _held_by_ddp.append(wrapper.module)


def install(observer: Observer) -> Models:
    """Hook every model that is called from now on."""
    models = Models(observer)
    replace(torch.nn.Module, "__call__", models.wrap_call)
    for name in ("item", "cpu", "numpy", "tolist"):
        replace(torch.Tensor, name, functools.partial(_wrap_copy, observer))
    return models


def bytes_of(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor as an array, sample by sample; of any type."""
    with torch.no_grad():
        values = tensor.detach().to("cpu").contiguous()
        return values.reshape(len(values) if values.dim() else 1, -1).view(torch.uint8).numpy()


def _random_state() -> str:
    state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()
    return digest(bytes_of(state))


def _running_statistics(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in ("running_mean", "running_var"):
            yield name.removeprefix("module."), digest(bytes_of(buffer))


def _wrap_copy(observer: Observer, copy: Any) -> Any:
    """A method that copies a tensor to the host: noted where it is a GPU's."""

    @functools.wraps(copy)
    def observed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_cuda and (line := observer.line()):
            observer.write(HostCopy(observer.num_steps_seen + 1, line))
        return copy(tensor, *args, **kwargs)

    return observed
