"""Precision of a step, and steps whose gradients overflowed. `tensorflow/precision.py` has the same classes."""

import contextlib
from collections.abc import Callable

import torch

from allstep.pytorch.compat import unscale
from allstep.pytorch.optimizers.layers import local_gradients


class Precision:
    """float32 and tf32: layers compute in float32, and every step takes effect."""

    def computing(self) -> contextlib.AbstractContextManager:
        """Return the context in which forward passes run."""
        return contextlib.nullcontext()

    def unless_overflowed(
        self, optimizer: torch.optim.Optimizer, loss_scale: float, update: Callable[[], None]
    ) -> bool:
        """Call `update` with the averaged gradients in the parameters; return whether they overflowed."""
        update()
        return False


class Autocast(Precision):
    """bf16: layers compute in a narrower type where that is safe."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def computing(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self._device.type, self._dtype)


class ScaledFp16(Autocast):
    """fp16: gradients come multiplied by the loss scale; a step in which any of them overflows changes nothing."""

    def __init__(self, device: torch.device, overflowed_anywhere: Callable[[torch.Tensor], bool]) -> None:
        """`overflowed_anywhere` tells from this rank's count of overflows whether any rank has one."""
        super().__init__(device, torch.float16)
        self._overflowed_anywhere = overflowed_anywhere

    def unless_overflowed(
        self, optimizer: torch.optim.Optimizer, loss_scale: float, update: Callable[[], None]
    ) -> bool:
        gradients = local_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])
        overflowed = self._overflowed_anywhere(unscale(gradients, loss_scale, self._device))
        if not overflowed:
            update()
        return overflowed
