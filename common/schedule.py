"""The learning rate and the global batch size at any moment of a run.

Pure functions of progress, counted in samples: `samples_seen` is epoch * samples_per_epoch + offset, over all
ranks, at the start of a step. So neither the number of ranks nor gradient accumulation nor a resume shifts
them, and the batch size may change on the way. A step keeps the learning rate of its start.

A learning rate is representable in float32: both frameworks receive the same one to the last bit.

Momentum needs no correction when the learning rate changes (Goyal et al. 2017, section 3, remark 2). That is for a
velocity which holds the learning rate, v = m * v + lr * g, w = w - v, as in Keras' own SGD. The optimizers of both
trainers keep it out, v = m * v + g, w = w - lr * v; that is what the correction makes of the other. The callbacks of
`tensorflow/horovod_callbacks.py`, which meet Keras' own SGD, offer the correction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from allstep.common.config.train_config import DEFAULT_BATCH_SIZE, TrainConfig
from allstep.common.process.errors import UserError

Scaling = Literal["none", "linear", "sqrt"]
Decay = Literal["constant", "step", "cosine", "poly", "linear"]


@dataclass(frozen=True)
class Schedule:
    """What the learning rate and the global batch do over a run.

    The full learning rate is `base_lr` scaled to the global batch: by k = global batch / reference batch
    (linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1), by its square root (sqrt:
    Krizhevsky 2014, "One Weird Trick for Parallelizing Convolutional Neural Networks", section 5), or not
    at all. The warm-up leads up to it, the decay down from it.

    Raises:
        UserError: a value makes no sense; the message names it.
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
    """How the learning rate follows the global batch."""
    warmup_epochs: float = 0.0
    """Length of the warm-up. It starts at 1/k of the full learning rate; for k <= 1 it is flat."""
    decay: Decay = "constant"
    """What follows the warm-up."""
    milestones: tuple[float, ...] | None = None
    """step: epochs from the start of the run; None stands for 30, 60 and 80 of 90, as in Goyal et al."""
    step_factor: float = 0.1
    """step: what the learning rate is multiplied by at each milestone."""
    power: float = 2.0
    """poly: exponent of the remaining part of the run."""
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
    """The schedule of a run by its flags.

    Args:
        global_batch_size: of the flags, or of the checkpoint that is resumed.
        final_lr: in place of the flag's.

    Raises:
        UserError: a flag of the schedule is wrong.
    """
    flags = config.schedule
    ramp = () if flags.follows_noise else tuple(map(_ramp, flags.batch_ramp))
    largest = global_batch_size * max([1, *(factor for _, factor in ramp)])
    # The batch that nobody has asked for may exceed a small data set on many ranks: an epoch is a step then.
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
        milestones=flags.lr_milestones or None,
        step_factor=flags.lr_step_factor,
        power=flags.lr_power,
        final_lr=flags.final_lr if final_lr is None else final_lr,
        batch_ramp=ramp,
    )


def _ramp(text: str) -> tuple[float, int]:
    epoch, _, factor = text.partition(":")
    return float(epoch), int(factor)


# Bounds of --batch-ramp auto: the noise scale grows by orders of magnitude while a network learns, and an epoch should
# still have steps in which it can be measured.
_MOST_GROWTH, _LEAST_STEPS = 16, 4


def learning_rate(schedule: Schedule, samples_seen: int) -> float:
    """Learning rate of the step that starts at `samples_seen`; representable in float32.

    With progress t from 0 to 1 in the warm-up, and p from 0 to 1 over the rest of the run:

        warm-up   full * (1/k + (1 - 1/k) * t)                      Goyal et al. 2017, section 2.2
        step      full * step_factor ** milestones passed           Goyal et al. 2017, section 5.1
        cosine    final + (full - final) * (1 + cos(pi * p)) / 2    Loshchilov and Hutter 2017, "SGDR", eq. 5
        poly      final + (full - final) * (1 - p) ** power         linear: power 1

    A step's own length does not enter: at whole numbers of steps these are the numbers of PyTorch's LinearLR
    with start_factor 1/k, followed by MultiStepLR, CosineAnnealingLR or PolynomialLR. k and `full` follow the
    global batch of the moment (see `global_batch_size`).
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
    """Samples in the step that starts at `samples_seen`.

    Grows by `batch_ramp`. With scaling "none" the learning rate stays: then a growing batch does what a decay
    of the learning rate by the same factors would (Smith et al. 2018, "Don't Decay the Learning Rate,
    Increase the Batch Size"). With "linear" or "sqrt" the learning rate grows along with the batch.
    """
    factors = [factor for epoch, factor in schedule.batch_ramp if samples_seen >= epoch * schedule.samples_per_epoch]
    return schedule.global_batch_size * (factors[-1] if factors else 1)


def grown(
    schedule: Schedule, ramp: tuple[tuple[float, int], ...], *, epoch: int, noise_scale: float | None
) -> tuple[tuple[float, int], ...]:
    """The `batch_ramp` of --batch-ramp auto after an epoch: one doubling more where the gradient noise scale is above
    the global batch, up to a bound.

    A batch below the noise scale costs few samples more than the least number (McCandlish et al. 2018, section 2.3).

    Args:
        ramp: before.
        epoch: epochs completed.
    """
    factor = 2 * (ramp[-1][1] if ramp else 1)
    largest = min(_MOST_GROWTH * schedule.global_batch_size, schedule.samples_per_epoch // _LEAST_STEPS)
    now, then = schedule.global_batch_size * factor // 2, schedule.global_batch_size * factor
    return (*ramp, (float(epoch), factor)) if noise_scale and noise_scale > now and then <= largest else ramp


def _full_lr(schedule: Schedule, batch_size: int) -> float:
    k = batch_size / schedule.reference_batch_size
    return schedule.base_lr * {"none": 1.0, "linear": k, "sqrt": math.sqrt(k)}[schedule.scaling]


def _decayed(schedule: Schedule, full: float, samples_seen: int, warmup: float) -> float:
    if schedule.decay == "constant":
        return full
    if schedule.decay == "step":
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
    if schedule.milestones is not None:
        return schedule.milestones
    return tuple(schedule.num_epochs * epoch / 90 for epoch in (30, 60, 80))


def _ascending(epochs: tuple[float, ...]) -> bool:
    return all(epoch >= 0 for epoch in epochs) and all(one < next_one for one, next_one in pairwise(epochs))


def _expect(holds: bool, expected: str, received: object, advice: str = "correct it") -> None:
    if not holds:
        plain = " ".join(map(str, received)) if isinstance(received, tuple) else received
        raise UserError(f"expected {expected}, received {plain}; {advice}")
