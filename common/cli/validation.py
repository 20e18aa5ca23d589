"""Checks of whether a run's flags fit together and fit the data, before a framework is imported."""

import importlib.util
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from allstep.common.base.checkout import trainer_command
from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.catalog import strategies as registry
from allstep.common.catalog.networks import check_model_args, check_size
from allstep.common.catalog.user_file import check
from allstep.common.cli.data_validation import check_curriculum, check_data, check_images, num_samples_of
from allstep.common.config.data_config import check_path
from allstep.common.config.train_config import (
    OptimizerConfig,
    OutputConfig,
    ScheduleConfig,
    StrategyConfig,
    TrainConfig,
)
from allstep.common.files.disk import try_file, try_folder
from allstep.common.launch.placement import Placement


def validate(config: TrainConfig, strategies: Sequence[str], placement: Placement) -> None:
    """Check what the flags' types cannot, before a framework is imported. Raises UserError for the first mistake."""
    schedule = config.schedule
    if config.strategy_name not in strategies:
        framework = registry.find_framework(config.strategy_name)
        hint = did_you_mean(config.strategy_name, strategies, "choose one of them")
        if framework:
            hint = f"a strategy of {registry.TITLES[framework]}: start {trainer_command(framework)} for it"
        raise UserError(
            f"expected --strategy to be one of {', '.join(strategies)}, received {quote(config.strategy_name)}; {hint}"
        )
    framework = registry.find_framework(config.strategy_name)
    assert framework is not None  # it is one of `strategies`
    entry = registry.STRATEGIES[framework][config.strategy_name]
    if config.deterministic and not entry.synchronous:
        raise UserError(
            f"expected a synchronous strategy with --deterministic, received {config.strategy_name}: the order of its "
            "updates is left to chance; leave one of them out"
        )
    _check_conflicts(config)
    _check_output(config)
    _check_optimizer(config)
    _check_slices(config.parallel, config.strategy_name)
    check_size(config.model, config.model_depth, config.model_width)
    check_model_args(config.model, config.model_args)
    check_images(config)
    for name in ("plateau_patience", "plateau_factor"):
        if getattr(schedule, name) != getattr(ScheduleConfig, name) and schedule.lr_decay != "plateau":
            raise UserError(
                f"--{name.replace('_', '-')} needs --lr-decay plateau, received {schedule.lr_decay}; leave it out"
            )
    _check_ramp(config, framework)
    _check_schedule(config, 1 if entry.one_worker else placement.world_size)
    if placement.rank == 0:  # the paths may not exist on other hosts
        _check_paths(config)
        check_path(config.data)
        for word in (*config.output.metrics, config.output.best_by or ""):
            check(word, "--metrics")
        _check_trackers(config.output)
    check_data(config.data)
    check_curriculum(config.data)


def _check_conflicts(config: TrainConfig) -> None:
    """Refuse pairs of flags that exclude each other."""
    flags, schedule, output = config.parallel, config.schedule, config.output
    both_sizes = schedule.batch_size is not None and schedule.global_batch_size is not None
    in_trials = "Horovod's trials change the order in which gradients are added"
    by_itself = "the gradients of slices are computed by themselves and added up as they are"
    changed = [name for name in _NOT_WITH_SLICES if getattr(flags, name) != getattr(StrategyConfig, name)]
    for one, other, are_given, reason in (
        ("--batch-size (per rank)", "--global-batch-size", both_sizes, ""),
        ("--deterministic", "--autotune", config.deterministic and flags.autotune, in_trials),
        ("--recompute", "--compile", flags.recompute and flags.compile, "a compiler decides itself what to recompute"),
        ("--resume", "--init-from", output.resume not in (None, "auto") and output.init_from, ""),
        *(
            ("--trace", f"--{name}", flags.trace and getattr(flags, name), "")
            for name in ("compile", "elastic", "audit")
        ),
        *(("--slices", f"--{name.replace('_', '-')}", flags.slices is not None, by_itself) for name in changed),
    ):
        if are_given:
            raise UserError(
                f"expected {one} or {other}, received both{reason and ': ' + reason}; leave one of them out"
            )


_NOT_WITH_SLICES = ("compression", "op", "sync_batch_norm", "comm_hook")


def _check_output(config: TrainConfig) -> None:
    output = config.output
    if output.output_dir is None:
        for name, given in (
            ("--log-every", output.log_every and not (output.mlflow or output.wandb)),
            ("--tensorboard", output.tensorboard),
            ("--checkpoint-every", output.checkpoint_every),
            ("--profile", output.profile),
            ("--trace", config.parallel.trace),
        ):
            if given:
                raise UserError(f"expected --output-dir with {name}, received none; name a folder to write to")
        if output.resume in ("latest", "best", "auto"):
            raise UserError(
                f"expected --output-dir with --resume {output.resume}, received none; name the run's output directory"
            )
    if output.profile_ranks and output.profile is None:
        raise UserError("--profile-ranks needs --profile, received none; give the steps, as in --profile 10:15")


def _check_trackers(output: OutputConfig) -> None:
    for flag, given, module, package in (
        ("--mlflow", output.mlflow, "mlflow", "mlflow-skinny"),
        ("--wandb", output.wandb, "wandb", "wandb"),
    ):
        found = importlib.util.find_spec(module) if given else None
        # Both create folders of their names where they run, which Python takes for packages without an origin.
        if given and (found is None or found.origin is None):
            raise UserError(f"expected the package {module} with {flag}, received none; pip install {package}")


# Optimizers that use a flag.
_OPTIMIZERS = {"momentum": ("sgd", "nesterov", "lars"), "grad_averaging": ("novograd",)}


def _check_optimizer(config: TrainConfig) -> None:
    """Refuse flags that the optimizer would ignore, and flags that need a gradient that the strategy does not have."""
    flags, strategy, op = config.optimizer, config.strategy, config.parallel.op
    for item in fields(OptimizerConfig):
        value = getattr(flags, item.name)
        names = _OPTIMIZERS.get(item.name, (flags.optimizer,))
        if value != item.default and flags.optimizer not in names:
            raise UserError(
                f"expected --{item.name.replace('_', '-')} with --optimizer {' or '.join(names)} alone, received "
                f"{value} with --optimizer {flags.optimizer}; leave it out"
            )
    if flags.class_weights not in (None, "balanced"):
        from allstep.common.data.classes import read_class_weights

        read_class_weights(Path(flags.class_weights))
    for name, value in (("--clip-norm", flags.clip_norm), ("--gradient-noise", flags.gradient_noise)):
        if value and op != "average":
            raise UserError(
                f"expected --op average with {name}, which changes the average of the ranks' gradients, received {op}; "
                "leave one of them out"
            )
    if config.parallel.compression == "bf16" and op == "adasum":
        raise UserError("--compression bf16 needs --op average or sum, received adasum; use --compression fp16")
    for name, given in (("--gradient-noise", flags.gradient_noise > 0), ("--ema", flags.ema is not None)):
        if given and strategy == "parameter-server":
            raise UserError(
                f"expected a synchronous strategy with {name}, received --strategy {strategy}, whose updates have no "
                "common step; use horovod or multi-worker-mirrored"
            )


def _check_slices(flags: StrategyConfig, strategy: str) -> None:
    """Refuse flags that need --slices without it, and more processes or devices than slices."""
    if flags.slices is None:
        if flags.audit is not None:
            raise UserError(
                "expected --slices with --audit, which has two ranks compute each slice, received none; give --slices V"
            )
        if flags.bucket_size is not None and strategy in ("horovod", "fsdp"):
            raise UserError(
                f"expected --slices with --bucket-size and --strategy {strategy}, received none: without it {strategy} "
                "has no buckets; give --slices V, or leave --bucket-size out"
            )
        return
    for what, number in (("processes", flags.num_gpus or 1), ("devices", flags.num_devices or 1)):
        _check_as_many_slices(flags.slices, what, number)


def _check_as_many_slices(slices: int, what: str, number: int) -> None:
    if slices < number:
        raise UserError(
            f"expected --slices to be at least the number of {what}, {number}, received {slices}; raise it or take "
            f"fewer {what}"
        )


def _check_paths(config: TrainConfig) -> None:
    """Refuse output paths that cannot be written."""
    for flag, path, try_it in (
        ("--output-dir", config.output.output_dir, try_folder),
        ("--timeline", config.parallel.timeline, try_file),
    ):
        try:
            if path is not None:
                try_it(path)
        except OSError as error:
            raise UserError(
                f"expected {flag} to be a path that can be written, received {quote(path)}: "
                f"{error.strerror}; name another"
            ) from None


def _check_schedule(config: TrainConfig, num_workers: int) -> None:
    """Check what the flags determine of the schedule and the data.

    The number of ranks may still grow, and a resumed run may have another batch; checks that depend on these run later.
    """
    from allstep.common.recipe.schedule import make_schedule

    flags = config.schedule
    num_samples = num_samples_of(config.data)
    known = flags.global_batch_size is not None or flags.lr_scaling == "none"
    kept = config.output.resume and flags.batch_size is None and flags.global_batch_size is None
    if num_samples is None or kept:
        num_samples = 2**62
    validate_for_data(config, num_samples, num_workers)
    make_schedule(
        config,
        num_samples,
        config.global_batch_size(num_workers),
        final_lr=flags.final_lr if known else 0.0,
    )


def _check_ramp(config: TrainConfig, framework: str) -> None:
    """Refuse --batch-ramp auto combined with other steps, or where the gradient noise scale is not measured."""
    from allstep.common.recipe.noise_scale import why_not_measured

    ramp = config.schedule.batch_ramp
    if "auto" in ramp and not config.schedule.follows_noise:
        raise UserError(
            f"expected --batch-ramp to be auto or EPOCH:FACTOR, received {' '.join(ramp)}; give one of them"
        )
    if config.schedule.follows_noise and (why := why_not_measured(config, framework)):
        raise UserError(
            f"expected --batch-ramp auto where the gradient noise scale is measured, received {why}; docs/batches.md "
            "says where that is"
        )


def validate_for_data(config: TrainConfig, num_samples: int, world_size: int) -> None:
    """Check the configuration against the training samples.

    Raises UserError if there are more ranks than samples, or a global batch has too few samples for the ranks or
    slices.
    """
    global_batch_size = config.global_batch_size(world_size)
    if world_size > num_samples:
        raise UserError(
            f"expected at least one training sample per rank, received {num_samples} samples of "
            f"{config.data.dataset} for {world_size} ranks; start fewer ranks"
        )
    if global_batch_size < world_size:
        raise UserError(
            f"expected --global-batch-size to be at least the number of ranks, {world_size}, "
            f"received {global_batch_size}; give each rank a sample or start fewer ranks"
        )
    if config.parallel.slices:
        _check_as_many_slices(config.parallel.slices, "ranks", world_size)
    if (num_slices := config.parallel.num_slices) and global_batch_size < num_slices:
        cut = f", each cut into {config.parallel.accumulate_steps} by --accumulate-steps" * (
            config.parallel.accumulate_steps > 1
        )
        raise UserError(
            f"expected a global batch of at least {num_slices} samples for --slices {config.parallel.slices}{cut}, "
            f"received {global_batch_size}; raise --global-batch-size or lower --slices"
        )
