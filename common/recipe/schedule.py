"""Learning rate and global batch size at any moment of a run.

Both are pure functions of progress, counted in samples: `samples_seen` is epoch * samples_per_epoch + offset, over
all ranks, at the start of a step. So they do not depend on the number of ranks, gradient accumulation or resuming,
and the batch size may change during a run. A step keeps the learning rate of its start.

A learning rate is representable in float32, so both frameworks receive the same one to the last bit.

The momentum correction of Goyal et al. 2017 (section 3, remark 2) is not needed when the learning rate changes. It is
for a velocity that contains the learning rate, v = m * v + lr * g, w = w - v, as in Keras' SGD. The optimizers of
both trainers use v = m * v + g, w = w - lr * v, to which the correction is equivalent. The callbacks of
`tensorflow/drop_in/rate_callbacks.py`, which work with Keras' SGD, offer the correction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import DEFAULT_BATCH_SIZE, TrainConfig
from allstep.common.recipe.progress import Progress

Scaling = Literal["none", "linear", "sqrt"]
Decay = Literal["constant", "step", "cosine", "poly", "linear", "plateau"]


@dataclass(frozen=True)
class Schedule:
    """Schedule of the learning rate and the global batch over a run.

    The full learning rate is `base_lr` scaled to the global batch: by k = global batch / reference batch (linear: Goyal
    et al. 2017, "Accurate, Large Minibatch SGD", section 2.1), by its square root (sqrt: Krizhevsky 2014, "One Weird
    Trick for Parallelizing Convolutional Neural Networks", section 5), or not at all. The learning rate rises to it in
    the warm-up, and falls from it in the decay. Raises UserError, which names the value, if one is invalid.
    """

    base_lr: float
    """Learning rate for a global batch of `reference_batch_size`."""
    samples_per_epoch: int
    """Number of training samples."""
    num_epochs: int
    """Length of the run."""
    global_batch_size: int
    """Samples in a step, over all ranks and all steps of gradient accumulation, before any `batch_ramp`."""
    reference_batch_size: int = 256
    """Global batch size that `base_lr` was tuned for."""
    scaling: Scaling = "none"
    """Scaling of the learning rate with the global batch."""
    warmup_epochs: float = 0.0
    """Length of the warm-up, which starts at 1/k of the full learning rate; for k <= 1 it is flat."""
    decay: Decay = "constant"
    """Shape of the learning rate after the warm-up."""
    milestones: tuple[float, ...] | None = None
    """step: epochs from the start of the run; None stands for 30, 60 and 80 of 90, as in Goyal et al. plateau: those
    so far."""
    step_factor: float = 0.1
    """step, plateau: factor by which the learning rate is multiplied at each milestone."""
    power: float = 2.0
    """poly: exponent of the remaining fraction of the run."""
    final_lr: float = 0.0
    """cosine, poly, linear: the learning rate at the end of the run."""
    batch_ramp: tuple[tuple[float, int], ...] = ()
    """Pairs (epoch, factor): from that epoch on, the global batch is factor * `global_batch_size`."""

    def __post_init__(self) -> None:
        for name, flag in _COUNTS.items():
            _expect(getattr(self, name) >= 1, f"{flag} to be at least 1", getattr(self, name), "raise it")
        _expect(self.scaling in get_args(Scaling), f"--lr-scaling to be one of {get_args(Scaling)}", self.scaling)
        _expect(self.decay in get_args(Decay), f"--lr-decay to be one of {get_args(Decay)}", self.decay)
        _expect(0 < self.base_lr < math.inf, "--base-lr to be above 0 and finite", self.base_lr)
        _expect(
            0 <= self.warmup_epochs <= self.num_epochs,
            f"--warmup-epochs to be 0 to {self.num_epochs}, the number of --epochs",
            self.warmup_epochs,
        )
        _expect(
            _ascending(_milestones(self)), "--lr-milestones to be epochs from 0 on that ascend", self.milestones or ()
        )
        _expect(0 < self.step_factor <= 1, "--lr-step-factor to be above 0 and at most 1", self.step_factor)
        _expect(0 < self.power < math.inf, "--lr-power to be above 0 and finite", self.power)
        full = _full_lr(self, self.global_batch_size)
        _expect(0 <= self.final_lr <= full, f"--final-lr to be 0 to {full:g}, the full learning rate", self.final_lr)
        ramp = tuple(f"{epoch:g}:{factor}" for epoch, factor in self.batch_ramp)
        _expect(
            _ascending(tuple(epoch for epoch, _ in self.batch_ramp)), "--batch-ramp to have epochs that ascend", ramp
        )
        whole = all(isinstance(factor, int) and factor >= 1 for _, factor in self.batch_ramp)
        _expect(whole, "--batch-ramp to have whole factors of at least 1", ramp)


_COUNTS = {
    "samples_per_epoch": "the number of training samples",
    "num_epochs": "--epochs",
    "global_batch_size": "--global-batch-size",
    "reference_batch_size": "the reference batch size",
}


def make_schedule(
    config: TrainConfig, num_samples: int, global_batch_size: int, *, final_lr: float | None = None
) -> Schedule:
    """Return the schedule that a run's flags describe. Raises UserError if a flag of the schedule is wrong.

    Args:
        global_batch_size: the one of the flags, or of the checkpoint that is resumed.
        final_lr: replaces the value of the flag.
    """
    flags = config.schedule
    steps = () if flags.follows_noise else (text.partition(":") for text in flags.batch_ramp)
    ramp = tuple((float(epoch), int(factor)) for epoch, _, factor in steps)
    largest = global_batch_size * max([1, *(factor for _, factor in ramp)])
    # The default batch may exceed a small data set on many ranks; an epoch then has one step.
    chosen = flags.batch_size or flags.global_batch_size or flags.drop_last or ramp
    if largest > num_samples and (chosen or config.parallel.accumulate_steps > 1):
        raise UserError(
            f"expected a global batch of at most all {num_samples} training samples, received {largest}; lower "
            "--batch-size, --global-batch-size, --accumulate-steps or --batch-ramp, or start fewer ranks"
        )
    return Schedule(
        base_lr=flags.base_lr,
        samples_per_epoch=num_samples,
        num_epochs=flags.epochs,
        global_batch_size=global_batch_size,
        reference_batch_size=DEFAULT_BATCH_SIZE,
        scaling=flags.lr_scaling,
        warmup_epochs=flags.warmup_epochs,
        decay=flags.lr_decay,
        milestones=None if flags.lr_decay == "plateau" else flags.lr_milestones or None,
        step_factor=flags.plateau_factor if flags.lr_decay == "plateau" else flags.lr_step_factor,
        power=flags.lr_power,
        final_lr=flags.final_lr if final_lr is None else final_lr,
        batch_ramp=ramp,
    )


# Bounds of --batch-ramp auto: the noise scale grows by orders of magnitude during training, and an epoch should still
# have steps in which it can be measured.
_MAX_GROWTH, _MIN_STEPS = 16, 4


def learning_rate(schedule: Schedule, samples_seen: int) -> float:
    """Return the learning rate of the step that starts at `samples_seen`; it is representable in float32.

    With progress t from 0 to 1 in the warm-up, and p from 0 to 1 over the rest of the run:

        warm-up   full * (1/k + (1 - 1/k) * t)                      Goyal et al. 2017, section 2.2
        step      full * step_factor ** milestones passed           Goyal et al. 2017, section 5.1
        plateau   the same, where `dropped` finds the milestones
        cosine    final + (full - final) * (1 + cos(pi * p)) / 2    Loshchilov and Hutter 2017, "SGDR", eq. 5
        poly      final + (full - final) * (1 - p) ** power         linear: power 1

    The length of a step does not matter: at whole numbers of steps the values equal those of PyTorch's LinearLR
    with start_factor 1/k, followed by MultiStepLR, CosineAnnealingLR or PolynomialLR. k and `full` follow the
    current global batch (see `global_batch_size`).
    """
    batch_size = global_batch_size(schedule, samples_seen)
    full = _full_lr(schedule, batch_size)
    warmup = schedule.warmup_epochs * schedule.samples_per_epoch
    if samples_seen < warmup:
        start = min(1.0, schedule.reference_batch_size / batch_size)
        lr = full * (start + (1 - start) * samples_seen / warmup)
    else:
        lr = _decayed(schedule, full, samples_seen, warmup)
    return float(np.float32(lr))


def global_batch_size(schedule: Schedule, samples_seen: int) -> int:
    """Return the number of samples in the step that starts at `samples_seen`, which grows by `batch_ramp`.

    With scaling "none" the learning rate stays the same, and a growing batch has the effect of a learning rate that
    decays by the same factors (Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size"). With
    "linear" or "sqrt" the learning rate grows along with the batch.
    """
    factors = [factor for epoch, factor in schedule.batch_ramp if samples_seen >= epoch * schedule.samples_per_epoch]
    return schedule.global_batch_size * (factors[-1] if factors else 1)


def grown(
    schedule: Schedule, ramp: tuple[tuple[float, int], ...], *, epoch: int, noise_scale: float | None
) -> tuple[tuple[float, int], ...]:
    """Return the `batch_ramp` of --batch-ramp auto after an epoch: with one more doubling if the gradient noise scale
    is above the global batch, up to a bound.

    A batch below the noise scale needs few samples more than the minimum (McCandlish et al. 2018, section 2.3). `epoch`
    is the number of completed epochs, `ramp` the one before this epoch's end.
    """
    factor = 2 * (ramp[-1][1] if ramp else 1)
    largest = min(_MAX_GROWTH * schedule.global_batch_size, schedule.samples_per_epoch // _MIN_STEPS)
    now, then = schedule.global_batch_size * factor // 2, schedule.global_batch_size * factor
    return (*ramp, (float(epoch), factor)) if noise_scale and noise_scale > now and then <= largest else ramp


def is_grown(ramp: Sequence[tuple[float, int]], *, epoch: int) -> bool:
    """Return whether `grown` can have made `ramp` by the end of `epoch`, with global batches of any size."""
    doublings = tuple(2**number for number in range(1, _MAX_GROWTH.bit_length()))
    whole = all(float(begin).is_integer() and begin <= epoch for begin, _ in ramp)
    return whole and tuple(factor for _, factor in ramp) == doublings[: len(ramp)]


def dropped(
    schedule: Schedule, drops: tuple[float, ...], *, epoch: int, epochs_without_gain: int, patience: int
) -> tuple[float, ...]:
    """Return the milestones of --lr-decay plateau after an epoch, with one more after `patience` epochs that brought no
    gain since the one before.

    Keras' ReduceLROnPlateau with min_delta=0 has the same rule, and PyTorch's with threshold=0 and a patience that is
    lower by one. `epoch` is the number of completed epochs, `drops` are the milestones before this one's end; any other
    decay has none.
    """
    waited = min(epochs_without_gain, epoch - (drops[-1] if drops else 0))
    return (*drops, float(epoch)) if schedule.decay == "plateau" and waited >= patience else drops


def adapted(schedule: Schedule, progress: Progress) -> Schedule:
    """Return the schedule with what a run has found out so far: when to grow the batch, and when to lower the rate."""
    ramp, drops = progress.batch_ramp or schedule.batch_ramp, progress.lr_drops or schedule.milestones
    return replace(schedule, batch_ramp=ramp, milestones=drops)


def _full_lr(schedule: Schedule, batch_size: int) -> float:
    k = batch_size / schedule.reference_batch_size
    return schedule.base_lr * {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[schedule.scaling]


def _decayed(schedule: Schedule, full: float, samples_seen: int, warmup: float) -> float:
    if schedule.decay == "constant":
        return full
    if schedule.decay in ("step", "plateau"):
        passed = sum(samples_seen >= epoch * schedule.samples_per_epoch for epoch in _milestones(schedule))
        return full * schedule.step_factor**passed
    end = schedule.num_epochs * schedule.samples_per_epoch
    left = (end - samples_seen) / (end - warmup) if samples_seen < end else 0.0
    if schedule.decay == "cosine":
        # (1 + cos(pi * p)) / 2, without the loss of digits towards the end.
        remaining = math.sin(math.pi / 2 * left) ** 2
    else:
        remaining = left ** (schedule.power if schedule.decay == "poly" else 1.0)
    return schedule.final_lr + (full - schedule.final_lr) * remaining


def _milestones(schedule: Schedule) -> tuple[float, ...]:
    if schedule.milestones is not None or schedule.decay == "plateau":
        return schedule.milestones or ()
    return tuple(schedule.num_epochs * epoch / 90 for epoch in (30, 60, 80))


def _ascending(epochs: tuple[float, ...]) -> bool:
    return all(epoch >= 0 for epoch in epochs) and all(one < next_one for one, next_one in pairwise(epochs))


def _expect(holds: bool, expected: str, received: object, advice: str = "correct it") -> None:
    if not holds:
        plain = " ".join(map(str, received)) if isinstance(received, tuple) else received
        raise UserError(f"expected {expected}, received {plain}; {advice}")


def rate_factors(rates: Sequence[float]) -> list[float]:
    """Return each learning rate of an optimizer divided by the first that is not 0, which the schedule stands for.

    So groups of weights keep their learning rates relative to each other, as under torch's `LambdaLR`.
    """
    reference = next((rate for rate in rates if rate), 0.0)
    return [rate / reference if reference else 1.0 for rate in rates]
