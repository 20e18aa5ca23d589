"""Activation checkpointing: blocks discard their activations and recompute them in the backward pass (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost")."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep.common.base.random_state import drawing_again, states
from allstep.pytorch.compat import BatchNorm
from allstep.pytorch.kept.pass_state import statistics_of


def recompute_blocks(network: nn.Module) -> None:
    """Let each block of `network` keep only its inputs for the backward pass.

    A block is a module with children, either in the network itself or in a sequence of modules at any depth, or it is
    a run of layers without children in a sequence, up to a pooling layer.
    """
    if isinstance(network, nn.Sequential):
        network.forward = partial(_in_turn, _steps(network))  # pyright: ignore[reportAttributeAccessIssue]
    for module in network.children():
        if isinstance(module, nn.Sequential):
            recompute_blocks(module)
        elif any(module.children()) and not isinstance(network, nn.Sequential):
            module.forward = _Block([module], module.forward)


class _Block:
    """Function of some modules that keeps only its inputs for the backward pass."""

    def __init__(self, modules: Sequence[nn.Module], forward: Callable[..., torch.Tensor]) -> None:
        self._forward = forward
        inside = [one for module in modules for one in module.modules()]
        self._norms = [one for one in inside if isinstance(one, BatchNorm)]
        # The statistics of other layers may affect their outputs.
        others = [one for one in inside if not isinstance(one, BatchNorm)]
        self._statistics = [(module, name) for module in others for name in statistics_of(module)]
        # Saving the states takes 0.1 ms and restoring them 0.3 ms; `checkpoint` itself does so for PyTorch's generator.
        self._drawing_again = (lambda: drawing_again(states())) if any(map(_may_draw, inside)) else nullcontext

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._forward, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        values = [module._buffers[name] for module, name in self._statistics]
        copies = [one if one is None else one.clone() for one in values]
        return nullcontext(), self._again(self._drawing_again(), copies)

    @contextmanager
    def _again(self, drawing: AbstractContextManager, values: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """Recompute with the random numbers and statistics of the forward pass, and count no sample a second time."""
        before = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        buffers = [module._buffers[name] for module, name in self._statistics]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        self._put(values)
        try:
            with drawing:
                yield
        finally:
            for norm, (momentum, count) in zip(self._norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count
            self._put(buffers)

    def _put(self, values: Sequence[torch.Tensor | None]) -> None:
        for (module, name), value in zip(self._statistics, values, strict=True):
            module._buffers[name] = value


def _may_draw(module: nn.Module) -> bool:
    """Return whether a module may draw from Python's or NumPy's generators, as only user code does."""
    of_user = not type(module).__module__.startswith(("torch.", "torchvision.", "timm.", "allstep."))
    return of_user or "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _steps(sequence: nn.Sequential) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return the blocks of a sequence, and the sequences in it, in order."""
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    run: list[nn.Module] = []

    def end_run() -> None:
        if run:
            steps.append(_Block(run, partial(_in_turn, tuple(run))))
            run.clear()

    for module in sequence:
        if any(module.children()):
            end_run()
            steps.append(module if isinstance(module, nn.Sequential) else _Block([module], module))
        else:
            run.append(module)
            if isinstance(module, (nn.MaxPool2d, nn.AdaptiveAvgPool2d)):
                end_run()
    end_run()
    return steps


def _in_turn(steps: Sequence[Callable[[torch.Tensor], torch.Tensor]], values: torch.Tensor) -> torch.Tensor:
    for step in steps:
        values = step(values)
    return values
