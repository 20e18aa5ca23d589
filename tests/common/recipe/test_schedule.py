"""The schedule compared with PyTorch's schedulers, and its independence of the size of steps."""

from __future__ import annotations

import math
from typing import get_args

import keras
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from allstep.common.base.errors import UserError
from allstep.common.recipe.progress import Progress
from allstep.common.recipe.schedule import Decay, Schedule, adapted, dropped, global_batch_size, learning_rate

NUM_STEPS = 20  # an epoch of 1280 samples in batches of 64


def schedule(**changes) -> Schedule:
    values = {"base_lr": 0.1, "samples_per_epoch": 1280, "num_epochs": 9, "global_batch_size": 64}
    return Schedule(**{**values, **changes})


def rates(of: Schedule) -> np.ndarray:
    """Return the learning rate of each step of the run, float32."""
    total = of.num_epochs * of.samples_per_epoch
    return np.array([learning_rate(of, seen) for seen in range(0, total, of.global_batch_size)], np.float32)


def torch_rates(lr: float, num_steps: int, make_scheduler) -> np.ndarray:
    """Return the learning rates that a PyTorch scheduler gives to the same steps, float32."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, seen = make_scheduler(optimizer), []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(seen, np.float32)


DECAYS = {
    "constant": lambda optimizer, steps: lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0),
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
    "poly": lambda optimizer, steps: lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=2.0),
    "linear": lambda optimizer, steps: lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps
    ),
}


@pytest.mark.parametrize("decay", DECAYS)
def test_decay_is_pytorchs(decay):
    """Oracle: PyTorch's scheduler, which goes step by step in float64, so float32's last bit may differ."""
    ours = rates(schedule(decay=decay))
    theirs = torch_rates(0.1, len(ours), lambda optimizer: DECAYS[decay](optimizer, len(ours)))
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_warm_up_then_decay_is_pytorchs(decay, scaling, factor):
    """Oracle: SequentialLR of LinearLR with start_factor 1/N and PyTorch's decay over the rest."""
    ours = rates(schedule(decay=decay, scaling=scaling, reference_batch_size=8, warmup_epochs=2.5))
    warmup = 50

    def sequential(optimizer):
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / 8, total_iters=warmup)
        fall = DECAYS[decay](optimizer, len(ours) - warmup)
        return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])

    np.testing.assert_array_max_ulp(ours, torch_rates(0.1 * factor, len(ours), sequential), maxulp=1)


@pytest.mark.parametrize(("milestones", "epochs"), [(None, (3, 6, 8)), ((2.0, 5.5), (2, 5.5))])
def test_step_decay_is_pytorchs(milestones, epochs):
    """Oracle: MultiStepLR; by default at 30, 60 and 80 of 90 epochs, here 3, 6 and 8 of 9."""
    ours = rates(schedule(decay="step", milestones=milestones))
    steps = [int(epoch * NUM_STEPS) for epoch in epochs]
    theirs = torch_rates(0.1, len(ours), lambda optimizer: lr_scheduler.MultiStepLR(optimizer, steps))
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)


def validation_losses() -> np.ndarray:
    falling = np.concatenate([np.linspace(3, 1, 12), np.full(9, 1.0), np.linspace(1, 0.5, 9)])
    return falling + 0.3 * np.random.default_rng(0).random(30)


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_plateau_is_that_of_keras_and_pytorch(patience):
    """Oracles: Keras' ReduceLROnPlateau, and PyTorch's, which tolerates one epoch less."""
    losses, found, progress = validation_losses(), [], Progress()
    falling = schedule(decay="plateau", num_epochs=len(losses), step_factor=0.5)
    for epoch, loss in enumerate(losses, start=1):
        progress.finish_epoch(float(loss))
        gainless = progress.epochs_without_gain
        progress.lr_drops = dropped(
            falling, progress.lr_drops, epoch=epoch, epochs_without_gain=gainless, patience=patience
        )
        found.append(learning_rate(adapted(falling, progress), epoch * falling.samples_per_epoch))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    theirs = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=patience - 1, threshold=0, eps=0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1))
    callback = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=patience, min_delta=0)
    callback.set_model(model)
    callback.on_train_begin()
    expected: list[list[float]] = [[], []]
    for epoch, loss in enumerate(losses):
        theirs.step(loss)
        callback.on_epoch_end(epoch, {"val_loss": loss})
        expected[0].append(optimizer.param_groups[0]["lr"])
        expected[1].append(float(model.optimizer.learning_rate))
    assert len(set(found)) > 2
    for one in expected:
        np.testing.assert_allclose(found, one, rtol=1e-6)


def test_goyal_et_al_on_imagenet():
    """Oracle: Goyal et al. 2017, section 5.1: from 0.1 to 3.2 in 5 epochs, a tenth at 30, 60 and 80."""
    imagenet = Schedule(
        base_lr=0.1,
        samples_per_epoch=1_281_167,
        num_epochs=90,
        global_batch_size=8192,
        scaling="linear",
        warmup_epochs=5,
        decay="step",
    )
    expected = {
        0: 0.1,
        2.5: 1.65,
        5: 3.2,
        29.99: 3.2,
        30: 0.32,
        59.99: 0.32,
        60: 0.032,
        80: 0.0032,
        89.9: 0.0032,
    }
    for epoch, lr in expected.items():
        assert learning_rate(imagenet, math.ceil(epoch * 1_281_167)) == pytest.approx(lr, rel=1e-6)


@pytest.mark.parametrize("decay", ["cosine", "poly", "linear"])
def test_final_learning_rate(decay):
    """Oracle: the end of the run, and PyTorch's eta_min for the cosine."""
    falling = schedule(decay=decay, final_lr=0.01)
    ours = rates(falling)
    assert learning_rate(falling, 9 * 1280) == learning_rate(falling, 10**9) == float(np.float32(0.01))
    assert np.all(np.diff(ours) < 0)
    if decay == "cosine":
        theirs = torch_rates(
            0.1,
            len(ours),
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, len(ours), eta_min=0.01),
        )
        np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_global_batch_up_to_the_reference_needs_no_warm_up(batch_size):
    """Oracle: LinearLR with start_factor 1; a smaller batch has a smaller learning rate from the start."""
    flat = schedule(global_batch_size=batch_size, reference_batch_size=64, scaling="linear", warmup_epochs=2)
    assert np.all(rates(flat) == np.float32(0.1 * batch_size / 64))


schedules = st.builds(
    Schedule,
    base_lr=st.floats(1e-6, 100),
    samples_per_epoch=st.integers(1, 10**9),
    num_epochs=st.just(10),
    global_batch_size=st.integers(1, 10**5),
    scaling=st.sampled_from(["none", "linear", "sqrt"]),
    warmup_epochs=st.floats(0, 10),
    decay=st.sampled_from(["constant", "step", "cosine", "poly", "linear"]),
    power=st.floats(0.1, 4),
    batch_ramp=st.sampled_from([(), ((0.0, 2),), ((2.0, 2), (4.5, 8))]),
)


@given(schedules, st.floats(0, 1))
def test_a_float32_within_the_full_learning_rate(plan, progress):
    """Oracle: a round trip through float32, and the scaling rules."""
    seen = int(progress * plan.num_epochs * plan.samples_per_epoch)
    lr = learning_rate(plan, seen)
    assert float(np.float32(lr)) == lr
    k = global_batch_size(plan, seen) / 256
    full = plan.base_lr * {"none": 1, "linear": k, "sqrt": k**0.5}[plan.scaling]
    assert 0 <= lr <= full * (1 + 1e-6)


@pytest.mark.parametrize("decay", get_args(Decay))
def test_the_length_of_a_step_does_not_shift_it(decay):
    """Oracle: the same run in steps of half the length, every second of them."""
    halves = rates(schedule(decay=decay, global_batch_size=32))
    assert np.array_equal(rates(schedule(decay=decay)), halves[::2])


def walk(plan: Schedule, seen: int, until: int) -> list[tuple[int, int, float]]:
    """Return (samples seen, batch size, learning rate) of each step up to an epoch's or the walk's end."""
    steps = []
    while seen < until:
        batch_size = min(global_batch_size(plan, seen), plan.samples_per_epoch - seen % plan.samples_per_epoch)
        steps.append((seen, batch_size, learning_rate(plan, seen)))
        seen += batch_size
    return steps


@given(schedules.filter(lambda plan: plan.samples_per_epoch < 40 * plan.global_batch_size), st.data())
def test_resume_does_not_shift_it(plan, data):
    """Oracle: the undisturbed run; a resumed run knows only the number of samples seen."""
    until = plan.num_epochs * plan.samples_per_epoch
    undisturbed = walk(plan, 0, until)
    at = data.draw(st.integers(0, len(undisturbed) - 1))
    assert walk(plan, undisturbed[at][0], until) == undisturbed[at:]


def test_batch_ramp():
    """Oracle: Smith et al. 2018: the batch grows where the learning rate would fall, and the rate is constant."""
    ramp = schedule(batch_ramp=((3.0, 2), (6.0, 8)))
    batch_sizes = [global_batch_size(ramp, epoch * 1280) for epoch in range(9)]
    assert batch_sizes == [64] * 3 + [128] * 3 + [512] * 3
    assert global_batch_size(ramp, 3 * 1280 - 1) == 64
    assert {learning_rate(ramp, epoch * 1280) for epoch in range(9)} == {float(np.float32(0.1))}


def test_scaling_follows_the_ramp():
    """Oracle: the same schedule without a ramp, at the current batch size."""
    ramp = schedule(scaling="linear", decay="cosine", warmup_epochs=4, reference_batch_size=16, batch_ramp=((3.0, 2),))
    large = schedule(scaling="linear", decay="cosine", warmup_epochs=4, reference_batch_size=16, global_batch_size=128)
    for epoch in (3, 3.5, 4, 6.25):
        assert learning_rate(ramp, int(epoch * 1280)) == learning_rate(large, int(epoch * 1280))


FLAGS = {
    "samples_per_epoch": "number of training samples",
    "reference_batch_size": "reference batch size",
    "num_epochs": "--epochs",
    **{name: f"--lr-{name.replace('_', '-')}" for name in ("scaling", "decay", "milestones", "step_factor", "power")},
}
"""Names in error messages that differ from the fields of the schedule."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_lr": 0.0},
        {"base_lr": -1.0},
        {"base_lr": math.inf},
        {"base_lr": math.nan},
        {"samples_per_epoch": 0},
        {"num_epochs": 0},
        {"global_batch_size": 0},
        {"reference_batch_size": 0},
        {"scaling": "cubic"},
        {"decay": "exponential"},
        {"warmup_epochs": -0.1},
        {"warmup_epochs": 9.5},
        {"warmup_epochs": math.nan},
        {"milestones": (6.0, 3.0)},
        {"milestones": (-1.0,)},
        {"milestones": (3.0, 3.0)},
        {"step_factor": 0.0},
        {"step_factor": 1.5},
        {"power": 0.0},
        {"power": -2.0},
        {"final_lr": -0.1},
        {"final_lr": 0.2},
        {"batch_ramp": ((2.0, 2), (1.0, 4))},
        {"batch_ramp": ((1.0, 0),)},
        {"batch_ramp": ((1.0, 1.5),)},
    ],
    ids=str,
)
def test_mistakes_are_one_line_that_names_the_flag(wrong):
    [name] = wrong
    flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
    with pytest.raises(UserError, match=rf"^expected .*{flag}.*, received .*; ") as caught:
        schedule(**wrong)
    assert "\n" not in str(caught.value)


def test_a_whole_run_may_be_warm_up():
    """Oracle: LinearLR, which reaches the full learning rate when the run ends."""
    rising = schedule(reference_batch_size=8, warmup_epochs=9, decay="cosine")
    theirs = torch_rates(
        0.1, 180, lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1 / 8, total_iters=180)
    )
    np.testing.assert_array_max_ulp(rates(rising), theirs, maxulp=1)
