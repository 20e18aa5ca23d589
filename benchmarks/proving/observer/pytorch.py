"""Observes PyTorch: its optimizers, models, loaders, and collectives, each by a file of its own."""

from __future__ import annotations

from allstep.benchmarks.proving.observer import (
    pytorch_collectives,
    pytorch_data,
    pytorch_files,
    pytorch_models,
    pytorch_optimizers,
)
from allstep.benchmarks.proving.observer.observer import Observer


def install(observer: Observer) -> None:
    """Hook torch, which has been imported."""
    models = pytorch_models.install(observer)
    pytorch_optimizers.install(observer, models)
    pytorch_data.install(observer)
    pytorch_collectives.install(observer)
    pytorch_files.install(observer)
