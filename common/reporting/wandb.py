"""Reports to Weights & Biases: flags as the configuration, curves as history, and what else a run says beside them."""

from __future__ import annotations

import importlib
from typing import Any

from allstep.common.config.train_config import TrainConfig
from allstep.common.reporting.base import Reporter
from allstep.common.reporting.scalars import CURVES, scalars


class WandB(Reporter):
    """A run as its own environment variables say, WANDB_PROJECT, WANDB_MODE and WANDB_DIR above all."""

    def __init__(self, config: TrainConfig) -> None:
        """Raises: what wandb does where it cannot begin a run, as without a key for its server."""
        wandb = importlib.import_module("wandb")  # by its name, as in `mlflow.py`
        # It leaves the terminal alone: what it would add there are lines of its own among those of the run.
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
