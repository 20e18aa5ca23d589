"""Flags that all ranks of a job must have alike."""

from __future__ import annotations

import json
from pathlib import Path

from allstep.common.config.train_config import TrainConfig

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
