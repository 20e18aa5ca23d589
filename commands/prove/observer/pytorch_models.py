"""Observe calls of models in PyTorch: their samples, training mode, random numbers, running statistics and wrappers."""

import functools
import sys
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from allstep.commands.prove.observer.guarding import Observation
from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.pytorch_values import as_rows, bytes_of, is_shard, some_bytes
from allstep.commands.prove.observer.values import Samples, digest
from allstep.commands.prove.records import FROZEN, RUNNING, Forward, HostCopy

_FIRST_CALLS = 6
"""Calls of a model after which its buffers are recorded."""


class Wrappers:
    """Wrappers of one process: which averages the gradients of which weights, and what keeps it from that."""

    def __init__(self) -> None:
        self._lines: dict[int, str] = {}  # by parameter
        self._ddp: dict[int, weakref.ref[DistributedDataParallel]] = {}  # by parameter
        self._synchronizes: dict[int, bool] = {}  # by DDP that has been called since the last step
        self._sharded: set[int] = set()
        self._sent_buffers: set[int] = set()
        self._inner: list[torch.nn.Module] = []

    def cover(self, parameters: Iterable[torch.Tensor], line: str) -> None:
        """Note that the wrapper made in a line averages the gradients of these parameters."""
        self._lines.update((id(parameter), line) for parameter in parameters)

    def cover_by_ddp(self, wrapper: DistributedDataParallel, line: str) -> None:
        """Note that DistributedDataParallel averages the gradients of its model."""
        self.cover(wrapper.parameters(), line)
        self._ddp.update((id(parameter), weakref.ref(wrapper)) for parameter in wrapper.parameters())
        self._inner.append(wrapper.module)
        if wrapper.broadcast_buffers:
            self._sent_buffers.update(map(id, wrapper.buffers()))

    def shard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that each rank has a shard of these parameters."""
        self._sharded.update(map(id, parameters))

    def is_sharded(self, parameter: torch.Tensor) -> bool:
        """Return whether each rank has a shard of a parameter."""
        return is_shard(parameter) or id(parameter) in self._sharded

    def is_kept_alike(self, tensor: torch.Tensor, name: str) -> bool:
        """Return whether ranks have shards of a tensor, or it is a running statistic of which DDP sends rank 0's."""
        return self.is_sharded(tensor) or (id(tensor) in self._sent_buffers and name.endswith(RUNNING))

    def note_forward(self, wrapper: DistributedDataParallel) -> None:
        """Note that DistributedDataParallel is called, and whether it will average."""
        self._synchronizes[id(wrapper)] = bool(wrapper.require_backward_grad_sync)

    def is_inner(self, model: torch.nn.Module) -> bool:
        """Return whether DistributedDataParallel holds a model."""
        return any(model is inner for inner in self._inner)

    def line_of(self, parameters: Sequence[torch.Tensor]) -> tuple[str, int]:
        """Return the line of the parameters' wrapper, and how many parameters have none."""
        lines = [self._lines.get(id(parameter), "") for parameter in parameters]
        return next(filter(None, lines), ""), lines.count("")

    def bypass_of(self, parameters: Sequence[torch.Tensor]) -> str:
        """Return what has kept DistributedDataParallel from averaging before a step, and start over."""
        found = (self._ddp.get(id(parameter)) for parameter in parameters)
        wrappers = {id(wrapper): wrapper for one in found if one and (wrapper := one())}
        calls = [self._synchronizes.pop(key, None) for key in wrappers]
        return "inner" if None in calls else "no_sync" if False in calls else ""


class Models:
    """Models of one process. If a model calls others, only the outermost call counts."""

    def __init__(self, observer: Observer, wrappers: Wrappers) -> None:
        self._observer = observer
        self._wrappers = wrappers
        self._depth = threading.local()
        self._called: list[torch.nn.Module] = []
        self._num_calls: dict[int, int] = {}  # by model
        self._last_looks: dict[int, int] = {}  # steps, by model
        self._weights = observer.quiet("weights of models that are called without gradients", self._digest_of, "")
        self._samples = Samples(as_rows)
        self._returned: dict[int, set[StorageWeakRef | None]] = {}  # by model, of its last call
        self._rows = observer.quiet("inputs of models without digests", self._sized, ((), 0))
        self._note_outputs = observer.quiet("outputs of models", self._keep_outputs)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the name of a parameter in the models that have been called."""
        for model in self._called:
            for name, own in model.named_parameters():
                if own is parameter:
                    return name.removeprefix("_orig_mod.").removeprefix("module.")
        return None

    def place_of(self, parameter: torch.Tensor) -> int:
        """Return the place of a parameter among all of the models that have been called."""
        own = (one for model in self._called for one in model.parameters())
        return next((place for place, one in enumerate(own) if one is parameter), sys.maxsize)

    def with_gradients(self) -> Iterator[torch.Tensor]:
        """Return an iterator over the weights of called models that have gradients."""
        return (one for model in self._called for one in model.parameters() if one.grad is not None)

    def wrap_call(self, call: Any) -> Any:
        """Wrap `Module.__call__` to observe it."""
        observed = self._observer.around("calls of models", self._observe)(call)
        observed_loss = self._observer.around("buffers of losses", self._observe_loss)(call)
        has_weights = self._observer.quiet("calls of models", _has_weights, False)

        @functools.wraps(call)
        def outermost(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_inner = torch.compiler.is_compiling() or getattr(self._depth, "is_inside", False)
            if is_inner or torch.jit.is_tracing() or not (args or kwargs):  # parametrizations take no arguments  # pyright: ignore[reportPrivateImportUsage]
                return call(module, *args, **kwargs)
            if not has_weights(module):
                return (observed_loss if module._buffers and self._called else call)(module, *args, **kwargs)
            self._depth.is_inside = True
            try:
                return observed(module, *args, **kwargs)
            finally:
                self._depth.is_inside = False

        return outermost

    def _observe(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Generator[None, Any, None]:
        observer = self._observer
        if not any(module is known for known in self._called):
            self._called.append(module)
        line, by_library, before = observer.line(), observer.is_by_library(), _random_state()
        earlier, step = observer.collectives.copy(), observer.progress.num_steps + 1
        rows, num_bytes = self._rows(module, (args, kwargs), line)
        if not rows:
            observer.note_unseen("samples of a model whose inputs have no digests", f"called at {line}")
        with observer.waiting("the model", computes=True):
            outputs = yield
        self._note_outputs(module, outputs)
        # A call that steps by itself, such as of Lightning's manual optimization, has no outputs.
        has_gradients = any(one.requires_grad for one in _tensors(outputs)) or observer.progress.num_steps >= step
        is_training = torch.is_grad_enabled() and has_gradients
        observer.write(
            Forward(
                step=step,
                loop=observer.progress.loop,
                is_training=is_training,
                rows=rows,
                random_state=before if _random_state() != before else None,
                buffers=dict(self._buffers(module)),
                bypasses="DistributedDataParallel" if self._wrappers.is_inner(module) else None,
                line=line,
                callers=observer.callers(),
                in_eval=not module.training,
                by_library=by_library,
                collectives=tuple(observer.collectives - earlier),
                num_bytes=num_bytes,
                weights="" if is_training and _is_trained(module) else self._weights(module, step),
            )
        )

    def _observe_loss(self, module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        """Observe the buffers of a loss, such as the centre of a teacher's outputs."""
        outputs = yield
        if any(one.requires_grad for one in _tensors(outputs)) and (buffers := dict(self._buffers(module))):
            observer = self._observer
            step, line = observer.progress.num_steps + 1, observer.line()
            observer.write(Forward(step, observer.progress.loop, True, (), None, buffers, None, line, in_eval=False))

    def _sized(self, module: torch.nn.Module, inputs: Any, line: str) -> tuple[tuple[str, ...], int]:
        """Return digests of samples, to which states that the model has returned, as of an LSTM, do not belong."""
        site, returned = (line, id(module)), self._returned.get(id(module), ())

        def given(one: Any) -> Any:
            return None if isinstance(one, torch.Tensor) and _storage(one) in returned else one

        found = self._samples.sized(tree_map(given, inputs), site)
        return found if found[0] else self._samples.sized(inputs, (site, "whole"))

    def _keep_outputs(self, module: torch.nn.Module, outputs: Any) -> None:
        self._returned[id(module)] = {*map(_storage, _tensors(outputs))} - {None}

    def _digest_of(self, module: torch.nn.Module, step: int) -> str:
        """Return a digest of a model's weights, once for each step; empty if ranks have shards of these."""
        weights = list(module.parameters())
        if self._last_looks.get(id(module)) == step or any(map(self._wrappers.is_sharded, weights)):
            return ""
        self._last_looks[id(module)] = step
        return digest(np.concatenate([some_bytes(one).reshape(-1) for one in weights]))

    def _buffers(self, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
        """Yield digests of running statistics in evaluation, and of all that is not trained in the first calls."""
        digest_of = self._observer.quiet("buffers of models", lambda values: digest(some_bytes(values)), "")
        number = self._num_calls[id(module)] = self._num_calls.get(id(module), 0) + 1
        named = dict(module.named_buffers())
        weights = {name.removeprefix("module."): one for name, one in module.named_parameters()}
        frozen = {f"{FROZEN}{name}": one for name, one in weights.items() if not one.requires_grad}
        if number > _FIRST_CALLS:
            named = {} if module.training else {name: one for name, one in named.items() if name.endswith(RUNNING)}
        elif module.training:
            named |= frozen
            named = {name: one for name, one in named.items() if not self._wrappers.is_kept_alike(one, name)}
        for name, values in named.items():
            if values.is_floating_point():
                yield name.removeprefix("module."), digest_of(values)


def install(observer: Observer, wrappers: Wrappers) -> Models:
    """Hook every model that is called from now on."""
    models = Models(observer, wrappers)
    replace(torch.nn.Module, "__call__", models.wrap_call)
    for name in ("item", "cpu", "numpy", "tolist"):
        replace(torch.Tensor, name, observer.around("copies from GPUs", _observe_copy(observer)))
    return models


def _has_weights(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_trained(module: torch.nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())


def _storage(tensor: torch.Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except NotImplementedError:  # of sparse tensors, and in torch.func
        return None


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a model's outputs, of which some may be lists, mappings or objects."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for part in outputs.values():
            yield from _tensors(part)
    elif isinstance(outputs, (list, tuple)):
        for part in outputs:
            yield from _tensors(part)
    elif hasattr(outputs, "__dict__") and not isinstance(outputs, torch.nn.Module):
        yield from (part for part in vars(outputs).values() if isinstance(part, torch.Tensor))


def _random_state() -> str:
    state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.get_rng_state()
    return digest(bytes_of(state))


def _observe_copy(observer: Observer) -> Observation:
    """Return an observer of a method that copies a tensor to the host, to record copies from a GPU."""

    def observe(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> Generator[None, Any, None]:
        if tensor.is_cuda and (line := observer.line()):
            observer.write(HostCopy(observer.progress.num_steps + 1, line))
        yield

    return observe
