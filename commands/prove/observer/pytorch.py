"""Observes PyTorch: its optimizers, models, loaders, and collectives, each by a file of its own."""

from __future__ import annotations

import multiprocessing

import torch

from allstep.commands.prove.observer import (
    pytorch_collectives,
    pytorch_data,
    pytorch_files,
    pytorch_models,
    pytorch_optimizers,
)
from allstep.commands.prove.observer.observer import Observer
from allstep.common.launch.placement import apparent_rank


def install(observer: Observer) -> None:
    """Hook torch, which has been imported."""
    # Rank 0 has the weights of one rank, unless the script seeds. Which rank a process of torch.multiprocessing.spawn
    # is nobody knows yet.
    if multiprocessing.parent_process() is None:
        torch.manual_seed(apparent_rank())
    models = pytorch_models.install(observer)
    pytorch_optimizers.install(observer, models)
    pytorch_data.install(observer)
    pytorch_collectives.install(observer)
    pytorch_files.install(observer)
