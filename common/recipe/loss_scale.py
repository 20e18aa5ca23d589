"""Loss scale of --precision fp16: the factor that keeps small gradients from underflowing to 0.

Half precision has numbers from 6e-8 to 65,504. Gradients are computed from a loss that is multiplied by a scale, and
are divided by it before they change weights (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). The
scale is kept as large as possible: a step whose gradients are not all finite is skipped on all ranks and halves it,
and many good steps in a row double it. torch.amp.GradScaler and Keras' LossScaleOptimizer have the same rule, the
former with the same numbers. Both frameworks share this code, so a run resumed in the other one keeps its scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from allstep.common.base.errors import UserError

GROWTH_STEPS = 2000
"""Good steps in a row after which the scale doubles."""
LARGEST, SMALLEST = 2.0**127, 2.0**-14
"""Bounds of the scale: the largest power of two in float32, and the smallest normal number of half precision, below
which gradients that still overflow would do so at any scale."""


@dataclass(frozen=True)
class LossScale:
    """Loss scale of the next step."""

    value: float = 2.0**16
    """Power of two, so that multiplying and dividing by it is exact."""
    good_steps: int = 0
    """Number of steps since the scale last changed."""
    skipped_steps: int = 0
    """Number of steps skipped in the run so far."""

    def after(self, scale: float, *, overflowed: bool) -> LossScale:
        """Return the loss scale after a step that used `scale`.

        Asynchronous steps may have been started with a larger scale before it was halved; their overflow does not
        change the current scale. Raises UserError if the scale cannot be halved any further.
        """
        if overflowed and scale > self.value:
            return replace(self, skipped_steps=self.skipped_steps + 1)
        if overflowed:
            if self.value / 2 < SMALLEST:
                raise UserError(
                    "expected gradients that are finite in half precision, received an overflow with losses "
                    f"multiplied by {self.value:g}; lower --base-lr, or give --precision bf16"
                )
            return LossScale(self.value / 2, 0, self.skipped_steps + 1)
        if self.good_steps + 1 < GROWTH_STEPS:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(min(2 * self.value, LARGEST), 0, self.skipped_steps)
