"""Checks of whether a run can resume from a checkpoint.

The fields of its checkpoint are checked by themselves (`saved_run`), then against the flags and the number of samples,
and its arrays against the network. Checks that need a framework or the data run last.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from allstep.common import checkpoint
from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.catalog import user_file
from allstep.common.checkpoint import TrainState
from allstep.common.checkpoint.manifest import Manifest
from allstep.common.checkpoint.weights_file import check_readable, is_weights_file, read_weights
from allstep.common.config.data_config import FORMATS, PYTHON, DataConfig
from allstep.common.config.train_config import MOMENTUM_OPTIMIZERS, TrainConfig
from allstep.common.exact import environment_fingerprint
from allstep.common.training.description import Description, check_same, read_description
from allstep.common.training.same_on_ranks import check_data, resolve_auto
from allstep.common.training.saved_run import check_run

T = TypeVar("T")


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


_OWN_FLAGS = ("image-size", "input-fields", "target-field", "validation-share")
# Flags of a data set that determine its images and classes.
_SHAPES = {
    "synthetic": ("synthetic-shape", "synthetic-classes"),
    "image-folder": ("image-size", "validation-share", "exif-orientation"),
    **dict.fromkeys((*FORMATS, PYTHON), (*_OWN_FLAGS, "exif-orientation", "task", "text-tokens")),
}


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


def _as_flag(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
