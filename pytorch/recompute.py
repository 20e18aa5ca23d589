"""Activation checkpointing: blocks discard their activations and recompute them in the backward pass (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost")."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allstep.pytorch.compat import BatchNorm


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
        self._norms = [norm for module in modules for norm in module.modules() if isinstance(norm, BatchNorm)]

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._forward, *inputs, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        return contextlib.nullcontext(), self._again()

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Keep batch norms from updating their running statistics, which already include these samples."""
        before = [(norm.momentum, norm.num_batches_tracked) for norm in self._norms]
        for norm in self._norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            for norm, (momentum, count) in zip(self._norms, before, strict=True):
                norm.momentum, norm.num_batches_tracked = momentum, count


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
