"""Files of an earlier run in the output directory, which are resumed or moved to a separate folder."""

from __future__ import annotations

import itertools
from pathlib import Path

from allstep.common.base.terminal import warn
from allstep.common.config.train_config import OutputConfig
from allstep.common.exact import trace
from allstep.common.reporting.base import output_dir_errors


def goes_on(flags: OutputConfig, directory: Path) -> bool:
    """Return whether a run resumes the one in `directory`; the files of any other run would mix with those there."""
    if flags.resume in (None, "latest", "best"):
        return flags.resume is not None
    return Path(flags.resume).resolve().is_relative_to(directory.resolve())


def set_aside(directory: Path) -> None:
    """Move an earlier run's files into a separate folder, so that a new run neither loses nor continues them."""
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
