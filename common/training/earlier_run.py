"""What an earlier run left in the output directory: gone on with, or kept in a folder of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

from allstep.common.base.terminal import warn
from allstep.common.config.train_config import OutputConfig
from allstep.common.exact import trace
from allstep.common.reporting.base import output_dir_errors


def goes_on(flags: OutputConfig, directory: Path) -> bool:
    """Whether a run resumes the one whose files `directory` holds; any other run's files would mix with them."""
    if flags.resume in (None, "latest", "best"):
        return flags.resume is not None
    return Path(flags.resume).resolve().is_relative_to(directory.resolve())


def set_aside(directory: Path) -> None:
    """Move what an earlier run left into a folder of its own: a fresh run neither loses it nor goes on from it."""
    left = [directory / name for name in ("metrics.jsonl", "config.yaml", "checkpoints", "tensorboard", trace.FOLDER)]
    left = [path for path in left if path.exists()]
    if left:
        number = next(number for number in itertools.count(1) if not (directory / f"previous-{number}").exists())
        aside = directory / f"previous-{number}"
        with output_dir_errors(aside):
            aside.mkdir()
            for path in left:
                path.rename(aside / path.name)
        warn(f"the run that {directory} held is kept in {aside}; --resume latest would have gone on with it")
