"""What a run tells, on rank 0 alone: the terminal, metrics.jsonl and config.yaml."""

from __future__ import annotations

import sys

from allstep.common.config import TrainConfig
from allstep.common.reporting.base import Listeners, Reporter
from allstep.common.reporting.console import EpochLines, ProgressBar
from allstep.common.reporting.jsonl import JsonLines

__all__ = ["Reporter", "open_reporter"]


def open_reporter(config: TrainConfig, rank: int) -> Reporter:
    """The reporters of a run: all of them on rank 0, none elsewhere."""
    if rank != 0:
        return Listeners()
    reporters: list[Reporter] = [EpochLines()]
    if sys.stderr.isatty():
        reporters.append(ProgressBar(config.schedule.epochs))
    if config.output.output_dir:
        reporters.append(JsonLines(config.output.output_dir / "metrics.jsonl"))
    return Listeners(reporters)
