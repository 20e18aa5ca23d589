"""The loss scale of --precision fp16: by how much losses are multiplied, so that small gradients do not become 0.

Half precision ends at 65,504 and at 6e-8. Gradients are computed from a loss that is multiplied by a scale, and divided
by it before they change weights (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). The scale is as
large as it can be: a step whose gradients are not all finite is skipped on all ranks and halves it, many good ones in a
row double it. That is the rule of torch.amp.GradScaler and of Keras' LossScaleOptimizer, with GradScaler's numbers;
here it is one for both frameworks, so that a run resumed in the other one goes on with the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from allstep.common.process.errors import UserError

GROWTH_STEPS = 2000
"""Good steps in a row after which the scale doubles."""
LARGEST, SMALLEST = 2.0**127, 2.0**-14
"""float32 has no larger power of two. A scale below the smallest normal number of half precision saves no gradient:
what overflows then would do so at any scale."""


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step."""

    value: float = 2.0**16
    """A power of two, so that to multiply and to divide by it rounds nothing."""
    good_steps: int = 0
    """Steps since it last changed."""
    skipped_steps: int = 0
    """Of all steps so far."""

    def after(self, scale: float, *, overflowed: bool) -> LossScale:
        """What follows a step that had `scale`, and whose gradients were not all finite, or were.

        Where steps are asynchronous, some were under way with a larger scale when this one came to be: that those
        overflow, too, says nothing about it.

        Raises:
            UserError: no scale is left that could help.
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
