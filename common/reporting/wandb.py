"""Reports to Weights & Biases: flags and start fields as configuration, curves as history, other fields as summary."""

from __future__ import annotations

import importlib
from typing import Any

from allstep.common.config.train_config import TrainConfig
from allstep.common.reporting.base import Reporter
from allstep.common.reporting.scalars import CURVES, scalars


class WandB(Reporter):
    """Reporter to Weights & Biases, configured by its environment variables such as WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, config: TrainConfig) -> None:
        """Start a run; if that fails, e.g. without an API key, wandb's exception is raised."""
        wandb = importlib.import_module("wandb")  # imported by name, as in `mlflow.py`
        # Keeps wandb's own lines out of the run's terminal output.
        settings = wandb.Settings(console="off", quiet=True)
        self._run, self._ended = wandb.init(config=config.flat(), settings=settings), False
        for curve in CURVES:
            self._run.define_metric(f"{curve}/*", step_metric=curve)

    def event(self, name: str, **fields: Any) -> None:
        if name in CURVES:
            self._run.log({name: fields[name], **scalars(name, fields)})
        elif name == "start":
            self._run.config.update(fields, allow_val_change=True)
        else:
            self._run.summary.update(fields)
            self._ended = name == "end"

    def close(self) -> None:
        self._run.finish(exit_code=0 if self._ended else 1)
