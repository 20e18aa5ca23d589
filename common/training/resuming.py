"""Checks of whether a run can resume from a checkpoint.

A checkpoint may be untrusted, with checksums recomputed after a change. So everything that training would use is
checked: its fields against each other, the flags and the number of samples, and its arrays against the network. Checks
that need a framework or the data run last.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from allstep.common import checkpoint
from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import Kind
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import model_name
from allstep.common.checkpoint import TrainState
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.checkpoint.weights_file import check_readable, is_weights_file, read_weights
from allstep.common.config.data_config import FORMATS, PYTHON, DataConfig, dataset_name
from allstep.common.config.train_config import MOMENTUM_OPTIMIZERS, OptimizerConfig, TrainConfig
from allstep.common.exact import environment_fingerprint
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
from allstep.common.training.description import Description, check_same, read_description
from allstep.common.training.same_on_ranks import check_data, resolve_auto

T = TypeVar("T")
_Seed = Annotated[int, whole(-(2**64), 2**64)]
_MAX_SECONDS = 1e10  # three hundred years
_MAX_EPOCHS_A_STEP = 100


def check_early(config: TrainConfig) -> None:
    """Check the checkpoint of --resume or --init-from, as far as possible before a framework is imported.

    Raises UserError if it does not exist, is damaged, or the run cannot resume from it.
    """
    output = resolve_auto(config, OneRank()).output
    if output.init_from and is_weights_file(output.init_from):
        check_readable(output.init_from)
    elif source := output.resume or output.init_from:
        manifest = checkpoint.load_manifest(
            *path_of(str(source), output.output_dir), check_run if output.resume else id
        )
        if output.resume:
            check_flags(config, manifest)


def load(
    config: TrainConfig,
    num_samples: int,
    shapes: Mapping[str, tuple[int, ...]],
    warn: Callable,
    data: Mapping[str, str] | None = None,
    description: Description | None = None,
) -> TrainState:
    """Load and check the state of --resume, or the weights of --init-from.

    Raises UserError if the checkpoint does not exist, or the run cannot resume from it.

    Args:
        num_samples: number of training samples of the data set.
        shapes: see `common.training.worker.Worker.state_shapes`.
        warn: called with a line for each difference that is not an error.
        data: digests of the data set, see `same_on_ranks`.
        description: of the run that resumes.
    """
    output = config.output
    if output.init_from:
        return load_weights(path_of(str(output.init_from), output.output_dir), shapes, warn)
    state = checkpoint.load(*path_of(str(output.resume), output.output_dir), warn=warn, check=check_run)
    check_flags(config, state)
    if description and (before := read_description(state.description)):
        check_same(before, description, advice=_OTHER_DATA)
    check_samples(state, num_samples)
    check_data(state.data, data or {})
    checkpoint.check_compatible(shapes, state.arrays)
    return state


def load_weights(
    source: tuple[str, Path], shapes: Mapping[str, tuple[int, ...]] | None, warn: Callable, *, averaged: bool = False
) -> TrainState:
    """Load the weights of a checkpoint or of a safetensors file, without what else it has.

    Raises UserError if there are none, or they do not fit.

    Args:
        source: the arguments of `checkpoint.load`; the first may be a safetensors file.
        shapes: names and shapes of the weights, of which others are ignored; None to check nothing.
        averaged: take the moving averages (--ema) where there are any.
    """
    if is_weights_file(Path(source[0])):
        arrays = {f"model/{name}": array for name, array in read_weights(Path(source[0])).items()}
        unknown = {name for name in arrays if name.endswith(_COUNT) and shapes is not None and name not in shapes}
        arrays = {name: array for name, array in arrays.items() if name not in unknown}
        state = TrainState(framework="pytorch", arrays=arrays, progress=checkpoint.Progress(0, 0, 0, 0))
    else:
        state = checkpoint.load(*source, warn=warn, groups=("model", "ema") if averaged else ("model",))
    averages = {
        name.replace("ema/", "model/", 1): array for name, array in state.arrays.items() if name.startswith("ema/")
    }
    if averaged and not averages:
        raise UserError(f"{source[0]} has no moving averages of weights, which --ema asks for; leave --ema out")
    arrays = _weights_alone(state.arrays)
    state = replace(state, arrays=arrays | averages if averaged else arrays)
    if shapes is not None:
        checkpoint.check_compatible(_weights_alone(shapes), state.arrays)
    return state


_COUNT = ".num_batches_tracked"  # of PyTorch's batch norms, which those of the suite and of Keras do not have
_OTHER_DATA = "resume with the same data, or use --init-from for the weights alone"


def path_of(which: str, output_dir: Path | None) -> tuple[str, Path]:
    """Return `which` and the checkpoints directory of the run, in which `latest` and `best` are looked up.

    Raises UserError if `which` is `latest` or `best`, and there is no output directory.
    """
    if which in ("latest", "best") and output_dir is None:
        raise UserError(f"expected --output-dir with --resume {which}, received none; name the run's output directory")
    return which, (output_dir or Path()) / "checkpoints"


def _weights_alone(named: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of a state that are weights of the network."""
    return {name: value for name, value in named.items() if name.startswith("model/")}


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


def check_flags(config: TrainConfig, saved: TrainState | Manifest) -> None:
    """Check that flags agree with the checkpoint: a position needs the same order of samples, slots the same optimizer.

    The user may change learning rate, momentum and weight decay. `saved` is a state or manifest that `check_run` has
    accepted. Raises UserError for the first flag that does not agree.
    """
    flags, defaults = config.flat(), TrainConfig().flat()
    order = ("curriculum", "curriculum-start", "curriculum-epochs") if flags["curriculum"] else ("curriculum",)
    model = ("model", "model-args") if flags["model-args"] or saved.config.get("model-args") else ("model",)
    for name in (
        "dataset",
        *_SHAPES.get(config.data.kind, ()),
        "standardize",
        "seed",
        "sampler",
        *order,
        *model,
        "optimizer",
    ):
        before = saved.config.get(name, defaults[name])  # older checkpoints lack some flags
        is_same = flags[name] == before
        if name == "model":  # a file may have moved; the network's weights are checked in any case
            is_same |= all(user_file.parse(str(one)) for one in (flags[name], before))
        if name in ("dataset", "curriculum") and saved.data and flags[name] and before:
            # Files may have moved; the digests in the checkpoint tell whether they are the same.
            is_same |= name == "curriculum" or _is_moved(flags[name], before)
        if not is_same:
            raise UserError(
                f"expected --{name} {_as_flag(before)}, with which the checkpoint was written, received "
                f"{_as_flag(flags[name])}; give the same flags to --resume, or --init-from for the weights alone"
            )
    _check_momentum(flags, saved.config)
    if saved.progress.epoch and flags["best-by"] != (before := saved.config.get("best-by")):
        raise UserError(
            f"expected --best-by {before or 'to be left out'}, by which the best so far was chosen, received "
            f"{flags['best-by'] or 'none'}; give the same to --resume, or --init-from for the weights alone"
        )
    if (flags["ema"] is None) != (saved.config.get("ema") is None):
        has, lacks = ("one", "none") if flags["ema"] is None else ("none", "one")
        raise UserError(
            f"expected --ema as in the run that wrote the checkpoint, which has {has}, received {lacks}; give the same "
            "flags to --resume, or --init-from for the weights alone"
        )
    environment_fingerprint.check_threads(config, saved.versions)
    completed = saved.progress.epoch + (saved.progress.offset > 0)
    if config.schedule.epochs < completed:
        raise UserError(
            f"expected --epochs to be at least {completed}, the epoch in which the checkpoint was written, received "
            f"{config.schedule.epochs}; raise it, or resume from an earlier checkpoint"
        )


def _check_momentum(flags: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Check that both runs keep momentum or neither does, since without it there are no slots."""
    now, then = flags["momentum"], before.get("momentum", flags["momentum"])
    if flags["optimizer"] in MOMENTUM_OPTIMIZERS and (now == 0) != (then == 0):
        raise UserError(
            f"expected --momentum {'0' if then == 0 else 'above 0'}, as in the run that wrote the checkpoint ({then}), "
            f"received {now:g}; give the same flags to --resume, or --init-from for the weights alone"
        )


def _is_moved(dataset: str, before: str) -> bool:
    """Return whether both names of data sets are paths in the same format, or both files of Python."""
    now, then = DataConfig(dataset), DataConfig(before)
    return now.kind == then.kind and now.path is not None and then.path is not None


def check_samples(saved: TrainState | Manifest, num_samples: int) -> None:
    """Refuse another number of training samples than that of the checkpoint."""
    if num_samples != saved.schedule["samples_per_epoch"]:
        raise UserError(
            f"expected {saved.schedule['samples_per_epoch']} training samples as the checkpoint has, received "
            f"{num_samples}; resume with the same data, or use --init-from for the weights alone"
        )


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
_OWN_FLAGS = ("image-size", "input-fields", "target-field", "validation-share")
# Flags of a data set that determine its images and classes.
_SHAPES = {
    "synthetic": ("synthetic-shape", "synthetic-classes"),
    "image-folder": ("image-size", "validation-share", "exif-orientation"),
    **dict.fromkeys((*FORMATS, PYTHON), (*_OWN_FLAGS, "exif-orientation", "task", "text-tokens")),
}


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


def _as_flag(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
