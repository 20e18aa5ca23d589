"""The training command line: one frozen dataclass a group of flags, read from flags and a YAML file.

Every field is a flag of the same name (`base_lr` is `--base-lr`) and a key of the YAML file given by
`--config`; flags win over the file. The two trainers take exactly the same flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from allstep.common.datasets.config import DataConfig, without_secrets
from allstep.common.errors import UserError
from allstep.common.launcher import Placement

DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, in which portions and with which learning rate to train."""

    epochs: int = 10
    """Number of passes over the training samples."""

    batch_size: int | None = None
    """Samples per rank and step; 32 where neither this nor --global-batch-size is given."""

    global_batch_size: int | None = None
    """Samples per step over all ranks. Give this to have the same training curve on any number of ranks."""

    base_lr: float = 0.01
    """Learning rate for a global batch of 32 samples; --lr-scaling carries it over to larger ones."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Growth of the learning rate with the global batch (Goyal et al. 2017; Krizhevsky 2014)."""

    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from its unscaled value, step by step."""

    lr_decay: Literal["constant", "step", "cosine", "poly", "linear"] = "constant"
    """What follows the warm-up."""

    lr_milestones: tuple[float, ...] = ()
    """step: epochs after which the learning rate falls; without any, at 30, 60 and 80 of 90 parts of the run."""

    lr_step_factor: float = 0.1
    """step: what the learning rate is multiplied by at each milestone."""

    lr_power: float = 2.0
    """poly: exponent of the remaining part of the run."""

    final_lr: float = 0.0
    """cosine, poly, linear: the learning rate at the end of the run."""

    batch_ramp: tuple[str, ...] = ()
    """EPOCH:FACTOR, as in 5:2 8:4: from that epoch on, a global batch is so many times as large (Smith et al. 2018)."""

    drop_last: bool = False
    """Leave out the last samples of an epoch's order where they do not fill a global batch."""

    early_stop_patience: int = 0
    """Stop when the validation loss has not fallen for N epochs; 0 never stops early."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients change weights; the same formulas in both frameworks."""

    optimizer: Literal["sgd", "nesterov", "adam", "adamw"] = "sgd"
    """sgd and nesterov take --momentum; weight decay is decoupled from the gradient in adamw alone."""

    momentum: float = 0.9
    """Momentum of sgd and nesterov."""

    weight_decay: float = 0.0
    """Weight decay factor."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Canonical names of what the optimizer remembers of each weight."""
        if self.optimizer in ("sgd", "nesterov"):
            return ("momentum",) if self.momentum else ()
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StrategyConfig:
    """How gradients meet; each flag says for which strategies it is."""

    compression: Literal["none", "fp16"] = "none"
    """horovod: send gradients as they are, or in half precision."""

    op: Literal["average", "sum", "adasum"] = "average"
    """horovod: what is done with the gradients of all ranks. sum moves the weights by the number of ranks times what
    average does, as if the learning rate were that much larger. adasum (Maleki et al. 2021) needs MPI and a power of
    two of ranks, and has another curve than average."""

    autotune: bool = False
    """horovod: let Horovod search for the fastest fusion threshold and cycle time while it trains."""

    timeline: Path | None = None
    """horovod: file for Horovod's timeline of every gradient's way; `allstep timeline FILE` sums it up."""

    accumulate_steps: int = 1
    """Passes of --batch-size samples a rank whose gradients are added up before one all-reduce and optimizer step."""

    sync_batch_norm: bool = False
    """pytorch: batch norm over the global batch instead of each rank's slice."""

    num_gpus: int | None = None
    """pytorch ddp, fsdp: without a launcher, start N processes on this host; data-parallel: use N devices."""

    bucket_size: float = 25.0
    """pytorch ddp: megabytes of gradients that are reduced together."""

    static_graph: bool = True
    """pytorch ddp: the network uses the same parameters in every step. Without effect under --accumulate-steps."""

    gradient_as_bucket_view: bool = True
    """pytorch ddp: gradients live in the buckets and are not copied."""

    comm_hook: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """pytorch ddp: how gradients are compressed (powersgd: Vogels et al. 2019)."""

    stages: int = 2
    """pytorch model-parallel: parts into which the network is cut, one process each."""

    micro_batches: int = 4
    """pytorch model-parallel: portions of a batch that are under way in the stages at once."""

    num_devices: int | None = None
    """tensorflow mirrored, central-storage: devices to use; CPUs are divided into as many where there are no GPUs."""

    communication: Literal["auto", "ring", "nccl"] = "auto"
    """tensorflow multi-worker-mirrored: how all-reduce is done."""


@dataclass(frozen=True)
class OutputConfig:
    """What a run leaves behind; without --output-dir nothing but the lines on the terminal."""

    output_dir: Path | None = None
    """Folder for config.yaml, metrics.jsonl and checkpoints/; created where it does not exist."""

    log_every: int = 0
    """Write loss and learning rate of every N-th step to metrics.jsonl; 0 writes epochs only."""

    tensorboard: bool = False
    """Write TensorBoard's event files to the output directory, too."""

    checkpoint_every: int = 0
    """Save a checkpoint after every N-th step besides those after each epoch; 0 saves after epochs only."""

    keep_checkpoints: int = 3
    """Number of the last checkpoints to keep; the best one by validation accuracy is kept besides."""

    resume: str | None = None
    """Go on from a checkpoint: latest, best (both in the output directory) or a path."""

    init_from: Path | None = None
    """Start from the weights of a checkpoint, written by either framework."""


@dataclass(frozen=True)
class FaultConfig:
    """When a run that does not go on is ended."""

    stall_timeout: float = 10.0
    """Seconds without progress after which a rank that the others wait for ends the job, with a report of who waits
    and where the missing rank is; 0 never ends it. The first step and checkpoints may take longer."""

    fault_timeout: float = 30.0
    """Seconds within which the job ends when a host cannot be reached any more."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    strategy: str | None = None
    """How the ranks are formed and gradients meet; horovod under a launcher and single without where not given."""

    list_strategies: bool = False
    """Print the strategies and whether this machine can run each, and do nothing else."""

    model: Literal["mlp", "cnn", "resnet18", "resnet50"] = "cnn"
    """The network."""

    precision: Literal["float32", "bf16"] = "float32"
    """In which layers compute; weights, gradients between ranks and the loss are float32 in either case."""

    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: StrategyConfig = field(default_factory=StrategyConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step over all ranks."""
        if self.schedule.global_batch_size is not None:
            return self.schedule.global_batch_size
        return (self.schedule.batch_size or DEFAULT_BATCH_SIZE) * world_size * self.parallel.accumulate_steps

    def flat(self) -> dict[str, Any]:
        """The resolved configuration as one mapping of flag names to plain values, as --config reads it."""
        flat: dict[str, Any] = {}
        for part in (self, self.data, self.schedule, self.optimizer, self.parallel, self.output, self.faults):
            for item in dataclasses.fields(part):
                value = getattr(part, item.name)
                if item.name == "mirror" and value:
                    value = without_secrets(value)
                if not dataclasses.is_dataclass(value) and item.name != "list_strategies":
                    plain = str(value) if isinstance(value, Path) else value
                    flat[item.name.replace("_", "-")] = list(plain) if isinstance(plain, tuple) else plain
        return flat


def parse(strategies: Sequence[str], place: Placement, argv: Sequence[str] | None = None) -> TrainConfig:
    """Read a run's configuration from the command line of this process, or from `argv`.

    Args:
        strategies: names of the framework's strategies; the choice is made by `place` where the user makes none.
        place: rank 0 alone prints the help text.

    Raises:
        UserError: a flag, its value or the YAML file is wrong.
        SystemExit: with status 0, after --help.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    described = tyro.conf.arg(help_behavior_hint="")
    parsed = Annotated[TrainConfig, described, tyro.conf.OmitArgPrefixes]
    arguments = _with_config_file(argv)
    answer, mistake = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(answer), contextlib.redirect_stderr(mistake):
            config = tyro.cli(parsed, args=arguments, description=_DESCRIPTION)
    except SystemExit as end:
        if end.code == 0:
            if place.rank == 0:
                print(answer.getvalue(), end="")
            raise
        raise UserError(_one_line(mistake.getvalue())) from None
    if config.strategy is None:
        config = dataclasses.replace(config, strategy="horovod" if place.launcher else "single")
    validate(config, strategies, place)
    return config


_DESCRIPTION = "Train a network. Flags may also stand in a YAML file: --config FILE.yaml; flags win over the file."


def _with_config_file(argv: list[str]) -> list[str]:
    """Replace `--config FILE` by the file's content as flags in front, where later ones override them."""
    rest: list[str] = []
    from_file: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != "--config":
            rest.append(argument)
            continue
        path = value if equals else next(arguments, None)
        if not path:
            raise UserError("expected a YAML file after --config, received nothing; name one as in --config run.yaml")
        from_file += _flags_from_yaml(Path(path))
    given = {argument.partition("=")[0] for argument in rest}
    if given & {"--batch-size", "--global-batch-size"}:  # two ways to say one thing: the file's gives way
        from_file = _without(from_file, {"--batch-size", "--global-batch-size"})
    return from_file + rest


def _without(flags: list[str], names: set[str]) -> list[str]:
    return [flag for i, flag in enumerate(flags) if flag not in names and (i == 0 or flags[i - 1] not in names)]


def _flags_from_yaml(path: Path) -> list[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"expected a readable YAML file for --config, received {path}: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(
            f"expected `flag: value` lines in {path}, received {type(content).__name__}; see --help for the flags"
        )
    flags: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def _one_line(panel: str) -> str:
    """The message of one of tyro's panels: a title, a rule, the message, a rule, hints."""
    sections = re.split(r"^\s*-{9,}\s*$", panel, flags=re.MULTILINE)
    return f"{' '.join(sections[1 if len(sections) > 1 else 0].split())} (--help lists all flags)"


_STRATEGIES_OF_ONE = {
    **dict.fromkeys(("ddp", "fsdp", "data-parallel", "model-parallel"), "PyTorch"),
    **dict.fromkeys(("mirrored", "multi-worker-mirrored", "central-storage", "parameter-server"), "TensorFlow"),
}


def validate(config: TrainConfig, strategies: Sequence[str], place: Placement) -> None:
    """Check what the types do not say.

    Raises:
        UserError: names the first wrong value.
    """
    schedule, optimizer = config.schedule, config.optimizer
    if config.strategy not in strategies:
        framework = _STRATEGIES_OF_ONE.get(config.strategy)
        hint = f", a strategy of {framework}: start {framework.lower()}/train.py for it" if framework else ""
        raise UserError(f"expected --strategy to be one of {', '.join(strategies)}, received {config.strategy}{hint}")
    if schedule.batch_size is not None and schedule.global_batch_size is not None:
        raise UserError("expected --batch-size (per rank) or --global-batch-size, received both; give one of them")
    for name, value, least in (
        ("--epochs", schedule.epochs, 1),
        ("--batch-size", schedule.batch_size, 1),
        ("--global-batch-size", schedule.global_batch_size, 1),
        ("--early-stop-patience", schedule.early_stop_patience, 0),
        ("--accumulate-steps", config.parallel.accumulate_steps, 1),
        ("--stages", config.parallel.stages, 1),
        ("--micro-batches", config.parallel.micro_batches, 1),
        ("--bucket-size", config.parallel.bucket_size, 0),
        ("--num-gpus", config.parallel.num_gpus, 1),
        ("--num-devices", config.parallel.num_devices, 1),
        ("--log-every", config.output.log_every, 0),
        ("--checkpoint-every", config.output.checkpoint_every, 0),
        ("--keep-checkpoints", config.output.keep_checkpoints, 1),
        ("--stall-timeout", config.faults.stall_timeout, 0),
        ("--fault-timeout", config.faults.fault_timeout, 3),
        ("--synthetic-samples", config.data.synthetic_samples, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"expected {name} to be at least {least}, received {value}")
    output = config.output
    if output.output_dir is None:
        for name, given in (
            ("--log-every", output.log_every),
            ("--tensorboard", output.tensorboard),
            ("--checkpoint-every", output.checkpoint_every),
        ):
            if given:
                raise UserError(f"expected --output-dir with {name}, received none; name a folder to write to")
    if output.resume and output.init_from:
        raise UserError("expected --resume or --init-from, received both; --resume takes the weights as well")
    if not 0 < schedule.base_lr < float("inf"):
        raise UserError(f"expected --base-lr to be a positive number, received {schedule.base_lr}")
    if not 0 <= optimizer.momentum < 1:
        raise UserError(f"expected --momentum in [0, 1), received {optimizer.momentum}")
    if not 0 <= optimizer.weight_decay < float("inf"):
        raise UserError(f"expected --weight-decay to be 0 or more, received {optimizer.weight_decay}")


def validate_for_data(config: TrainConfig, num_samples: int, world_size: int) -> None:
    """Check the configuration against the training samples.

    Raises:
        UserError: there are more ranks than samples, or a global batch does not fill the ranks.
    """
    global_batch_size = config.global_batch_size(world_size)
    if config.schedule.drop_last and global_batch_size > num_samples:
        raise UserError(
            f"expected a global batch size of at most {num_samples}, all samples, with --drop-last, received "
            f"{global_batch_size}; lower it or leave --drop-last out"
        )
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
