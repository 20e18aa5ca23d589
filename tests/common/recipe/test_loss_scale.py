"""The loss scale. Oracle: torch.amp.GradScaler's kernel, with GradScaler's default numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.recipe.loss_scale import GROWTH_STEPS, LARGEST, SMALLEST, LossScale

SCALER = torch.amp.GradScaler("cpu")


def after(scale: LossScale, overflows: list[bool]) -> LossScale:
    for overflowed in overflows:
        scale = scale.after(scale.value, overflowed=overflowed)
    return scale


@given(st.lists(st.tuples(st.integers(0, 2 * GROWTH_STEPS), st.integers(1, 4)), max_size=4))
def test_it_moves_as_grad_scaler_s(runs):
    """Each run has a number of good steps, followed by a number of steps that overflow."""
    value, tracker, scale = torch.tensor(SCALER.get_scale()), torch.tensor(0, dtype=torch.int32), LossScale()
    numbers = SCALER.get_growth_factor(), SCALER.get_backoff_factor(), SCALER.get_growth_interval()
    for num_good, num_bad in runs:
        for overflowed in [False] * num_good + [True] * num_bad:
            torch._amp_update_scale_(value, tracker, torch.tensor(float(overflowed)), *numbers)
            scale = scale.after(scale.value, overflowed=overflowed)
            assert (scale.value, scale.good_steps) == (value.item(), tracker.item())
    assert scale.skipped_steps == sum(num_bad for _, num_bad in runs)


def test_it_starts_as_grad_scaler_s():
    assert LossScale() == LossScale(SCALER.get_scale(), 0, 0)


def test_it_stays_finite():
    assert after(LossScale(LARGEST), [False] * GROWTH_STEPS) == LossScale(LARGEST)


def test_an_overflow_that_no_scale_mends_ends_the_run():
    lowest = dataclasses.replace(LossScale(), value=SMALLEST)
    with pytest.raises(UserError, match="finite in half precision, received an overflow .* --precision bf16"):
        after(lowest, [True])


def test_asynchronous_steps_of_one_scale_halve_it_once():
    """Four steps were in flight when the first of them overflowed; then one with the new scale does."""
    scale = LossScale()
    for _ in range(4):
        scale = scale.after(2.0**16, overflowed=True)
    assert scale == LossScale(2.0**15, 0, 4)
    assert scale.after(2.0**15, overflowed=True) == LossScale(2.0**14, 0, 5)
