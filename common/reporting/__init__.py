"""Reporters of a run, only on rank 0: the terminal, metrics.jsonl, TensorBoard, and experiment trackers."""

import sys

from allstep.common.config.train_config import TrainConfig
from allstep.common.recipe.progress import Progress
from allstep.common.reporting.base import EpochLines, EpochProgress, Listeners, Reporter
from allstep.common.reporting.jsonl import JsonLines, rewind
from allstep.common.reporting.trackers import Background, MLflow, TensorBoard, WandB

__all__ = ["Reporter", "open_reporter"]


def open_reporter(config: TrainConfig, rank: int, progress: Progress) -> Reporter:
    """Open the reporters of a run that begins at `progress`: all of them on rank 0, none on other ranks."""
    if rank != 0:
        return Listeners()
    reporters: list[Reporter] = [EpochLines()]
    if sys.stderr.isatty():
        reporters.append(EpochProgress(config.schedule.epochs))
    directory = config.output.output_dir
    if directory:
        path = directory / "metrics.jsonl"
        rewind(path, step=progress.step, epoch=progress.position.epoch)
        reporters.append(JsonLines(path))
    if directory and config.output.tensorboard:
        reporters.append(TensorBoard(directory / "tensorboard", progress))
    if config.output.mlflow:
        reporters.append(Background("--mlflow", lambda: MLflow(config)))
    if config.output.wandb:
        reporters.append(Background("--wandb", lambda: WandB(config)))
    return Listeners(reporters)
