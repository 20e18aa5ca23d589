"""Checks of the fields of a checkpoint's manifest: values that a run could have saved, which agree with each other.

A checkpoint may be untrusted, with checksums recomputed after a change. So everything that training would use is
checked.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import Kind
from allstep.common.catalog.networks import model_name
from allstep.common.checkpoint import TrainState
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.config.data_config import FORMATS, PYTHON, DataConfig, dataset_name
from allstep.common.config.train_config import OptimizerConfig
from allstep.common.files.strict_json import (
    Count,
    Mismatch,
    NonNegative,
    Shape,
    Whole,
    brief,
    from_json,
    number,
    one_of,
    text,
    whole,
)
from allstep.common.recipe.loss_scale import GROWTH_STEPS, LARGEST, SMALLEST
from allstep.common.recipe.schedule import Schedule, is_grown
from allstep.common.training.description import read_description

_Seed = Annotated[int, whole(-(2**64), 2**64)]
_MAX_SECONDS = 1e10  # three hundred years
_MAX_EPOCHS_A_STEP = 100


def check_run(saved: TrainState | Manifest) -> None:
    """Check all fields but arrays for values that a run could have saved; raises Mismatch for the first wrong one."""
    try:
        from_json(_Generators, saved.rng, "manifest.rng")
        schedule = _checked_schedule(saved.schedule)
        _check_config(saved.config)
        from_json(_Running, saved.progress.running, "manifest.progress.running")
        _check_sums(saved)
        read_description(saved.description)
        follows_noise = saved.config.get("batch-ramp") == ["auto"]
        if follows_noise and not is_grown(schedule.batch_ramp, epoch=saved.progress.epoch):
            raise Mismatch(f"expected batches that double up to 16 times, received {brief(schedule.batch_ramp)}")
        for _, factor in () if follows_noise else schedule.batch_ramp:
            whole(1, schedule.samples_per_epoch)(factor * schedule.global_batch_size, "batches of manifest.schedule")
        if schedule.decay == "plateau" and any(epoch > saved.progress.epoch for epoch in schedule.milestones or ()):
            raise Mismatch(f"expected milestones of epochs that are over, received {brief(schedule.milestones)}")
    except UserError as error:  # without the advice, which is meant for values on the command line
        raise Mismatch(str(error).partition(";")[0]) from None


def _check_sums(saved: TrainState | Manifest) -> None:
    """Check that the saved progress is possible; `common.training.saving.Saver` writes these numbers."""
    progress, schedule = saved.progress, saved.schedule
    samples, epochs = schedule["samples_per_epoch"], schedule["num_epochs"]
    in_epoch = progress.offset > 0
    where = "manifest.progress"
    whole(0, epochs)(progress.epoch, f"{where}.epoch")
    whole(0, samples if progress.epoch < epochs else 0)(progress.offset, f"{where}.offset")
    seen = progress.epoch * samples + progress.offset
    one_of(seen)(progress.samples_seen, f"{where}.samples_seen")
    whole(progress.epoch + in_epoch, seen)(progress.step, f"{where}.step")
    whole(1, _MAX_EPOCHS_A_STEP * samples)(schedule["global_batch_size"], "manifest.schedule.global_batch_size")
    one_of(saved.config["seed"])(saved.rng["seed"], "manifest.rng.seed")
    running, where = progress.running, f"{where}.running"
    whole(0, progress.epoch)(running["epochs_without_gain"], f"{where}.epochs_without_gain")
    for kind in (_LossScale, _Noise):  # older checkpoints have none of their fields
        if running.keys() & {item.name for item in fields(kind)}:
            from_json(kind, running, where)
    whole(0, progress.step)(running.get("skipped_steps", 0), f"{where}.skipped_steps")
    if not in_epoch:
        one_of(0.0)(running["loss_sum"], f"{where}.loss_sum")
    elif not running["epoch_seconds"]:
        raise Mismatch(f"expected {where}.epoch_seconds to be above 0 in mid-epoch, received 0")


def _checked_schedule(saved: Mapping[str, Any]) -> Schedule:
    where = "manifest.schedule"
    schedule = from_json(Schedule, saved, where)
    if missing := [item.name for item in fields(Schedule) if item.name not in saved]:
        raise Mismatch(f"expected {where} to have {missing[0]}, received {brief(sorted(saved))} alone")
    return schedule


def _check_config(saved: Mapping[str, Any]) -> None:
    config, where = {name.replace("-", "_"): value for name, value in saved.items()}, "manifest.config"
    kind = DataConfig(from_json(_Config, config, where).dataset).kind
    if kind in _CONFIGS:
        from_json(_CONFIGS[kind], config, where)


def _named_by(kind: Kind[str]) -> Shape:
    """Return a shape for strings that a flag of type `kind` accepts."""

    def check(value: Any, where: str) -> None:
        text(value, where)
        try:
            kind(value)
        except argparse.ArgumentTypeError as error:
            raise Mismatch(f"expected {where} {error}") from None

    return check


@dataclass(frozen=True)
class _Config:
    dataset: Annotated[str, _named_by(dataset_name)]
    seed: _Seed
    model: Annotated[str, _named_by(model_name)]
    optimizer: Annotated[str, one_of(*get_args(get_type_hints(OptimizerConfig)["optimizer"]))]


@dataclass(frozen=True)
class _OfSynthetic:
    synthetic_shape: tuple[Count, Count, Count]
    synthetic_classes: Count


@dataclass(frozen=True)
class _OfImages:
    image_size: Count


@dataclass(frozen=True)
class _OfSamples(_OfImages):
    input_fields: tuple[str, ...]
    target_field: str | None
    validation_share: Annotated[float, number(0, 1)]


_CONFIGS = {"synthetic": _OfSynthetic, "image-folder": _OfImages, **dict.fromkeys((*FORMATS, PYTHON), _OfSamples)}


@dataclass(frozen=True)
class _Generators:
    seed: _Seed


def _power_of_two(value: Any, where: str) -> None:
    number(SMALLEST, LARGEST)(value, where)
    if math.frexp(value)[0] != 0.5:
        raise Mismatch(f"expected {where} to be a power of two, received {value:g}")


@dataclass(frozen=True)
class _LossScale:
    loss_scale: Annotated[float, _power_of_two]
    good_steps: Annotated[int, whole(0, GROWTH_STEPS - 1)]
    skipped_steps: Whole


@dataclass(frozen=True)
class _Noise:
    noise_variance: Annotated[Any, number(-math.inf, math.inf)]
    noise_square: Annotated[Any, number(-math.inf, math.inf)]


_Seconds = Annotated[float, number(0, _MAX_SECONDS)]


@dataclass(frozen=True)
class _Running:
    loss_sum: float
    learning_rate: NonNegative
    epoch_seconds: _Seconds
    cumulative_seconds: _Seconds
    best_validation_loss: Annotated[Any, number(maximum=math.inf)]
    epochs_without_gain: Whole
