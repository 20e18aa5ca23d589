"""Files of an earlier run in the output directory, which are resumed or moved to a separate folder."""

import dataclasses
import os
from pathlib import Path

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.terminal import warn
from allstep.common.checkpoint.select import checkpoint_directories
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.exact import trace
from allstep.common.files.disk import unused
from allstep.common.reporting.base import output_dir_errors


def resolve_auto(config: TrainConfig, collectives: Collectives) -> TrainConfig:
    """Replace --resume auto by latest, without --init-from, or by nothing if there is no checkpoint yet.

    Collective: rank 0 decides for all ranks, since other hosts may not see the output directory.
    """
    output = config.output
    if output.resume != "auto":
        return config
    assert output.output_dir is not None  # `validate` asks for one
    is_there = collectives.rank == 0 and bool(checkpoint_directories(output.output_dir / "checkpoints"))
    [is_there] = collectives.all_reduce_sum(np.array([float(is_there)]))
    changes = {"resume": "latest", "init_from": None} if is_there else {"resume": None}
    return dataclasses.replace(config, output=dataclasses.replace(output, **changes))


def goes_on(flags: OutputConfig, directory: Path) -> bool:
    """Return whether a run resumes the one in `directory`; the files of any other run would mix with those there."""
    if flags.resume in (None, "latest", "best"):
        return flags.resume is not None
    return Path(flags.resume).resolve().is_relative_to(directory.resolve())


def set_aside(directory: Path) -> None:
    """Move an earlier run's files into a separate folder, so that a new run neither loses nor continues them."""
    left = [
        directory / name
        for name in ("metrics.jsonl", "config.yaml", "checkpoints", "tensorboard", "profile", trace.FOLDER)
    ]
    left = [path for path in left if os.path.lexists(path)]
    if left:
        aside = unused(directory / "previous")
        with output_dir_errors(aside):
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
        warn(f"the run that {directory} held is kept in {aside}; --resume latest would have gone on with it")
