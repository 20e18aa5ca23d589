"""Start of a trainer, before it builds anything: find its rank, parse its flags, refuse what cannot run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from allstep.common.cli.command_line import parse
from allstep.common.cli.strategy_flags import print_strategies
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.env_launcher import locate
from allstep.common.launch.placement import Placement, find_placement
from allstep.common.launch.spawn import check_shared_memory, spawn, stay_on_host
from allstep.common.process.environment import name_user
from allstep.common.training import elastic


def start(strategies: ModuleType, argv: Sequence[str] | None = None) -> tuple[TrainConfig, Placement]:
    """Return a run's configuration, from this process's command line or from `argv`, and this rank's placement.

    `strategies` is the framework's package of that name. --help and errors in the flags are printed before NumPy or the
    framework is imported. Raises UserError if a flag is wrong, or the run cannot be as configured; SystemExit if this
    process has nothing to train: it has printed --help or the strategies, or the ranks that it started have ended.
    """
    placement = find_placement()
    config = parse(strategies.STRATEGIES, placement, argv)
    if config.list_strategies:
        print_strategies(strategies.STRATEGIES, strategies.availability, placement)
        sys.exit()
    strategies.check(config, placement)
    elastic.check(config, placement)
    if num_ranks := strategies.num_ranks_to_spawn(config, placement):
        sys.exit(spawn(num_ranks))
    config = elastic.with_newest_checkpoint(config)
    placement = locate(placement, lambda: flags_of(config))
    stay_on_host(placement)
    name_user()
    if config.strategy_name == "horovod":
        check_shared_memory(placement)
    if placement.rank == 0:
        from allstep.common.training import resuming

        resuming.check_early(config)
    return config, placement


_OF_EACH_RANK = (
    *("data-dir", "mirror", "decode-threads", "data-workers"),
    *("mlflow", "wandb", "tensorboard", "timeline", "profile-ranks"),
)
"""Flags that may differ: where a host has its files and how many cores, and what rank 0 alone reads."""


def flags_of(config: TrainConfig) -> dict[str, str]:
    """Return the flags that all ranks must have alike; of files and folders, only whether they are given."""
    flags = {name: value for name, value in config.flat().items() if name not in _OF_EACH_RANK}
    resume = config.output.resume
    paths = {
        "dataset": config.data.path and config.data.kind,  # the samples themselves are compared
        "output-dir": config.output.output_dir,
        "init-from": config.output.init_from,
        "resume": resume and Path(resume).name != resume,
    }
    flags |= {name: f"{value} at a path" if name == "dataset" else "a path" for name, value in paths.items() if value}
    return {f"--{name}": json.dumps(value).strip('"') for name, value in flags.items() if value is not None}
