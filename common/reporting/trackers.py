"""Reports to experiment trackers.

MLflow gets flags as parameters, curves as metrics, and all other fields as tags. Weights & Biases gets flags and start
fields as configuration, curves as history, and other fields as summary.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from allstep.common.config.train_config import TrainConfig
from allstep.common.reporting.base import CURVES, Reporter, scalars


class MLflow(Reporter):
    """Reporter to MLflow, configured by its environment variables such as MLFLOW_TRACKING_URI."""

    def __init__(self, config: TrainConfig) -> None:
        """Start a run; if that fails, MLflow's exception is raised."""
        # Imported by name, so that type checkers do not report modules that are rarely installed.
        mlflow, entities = importlib.import_module("mlflow"), importlib.import_module("mlflow.entities")
        self._mlflow, self._entities, self._client, self._ended = mlflow, entities, mlflow.MlflowClient(), False
        run = mlflow.start_run()
        self._id = run.info.run_id
        if not run.data.params:  # MLFLOW_RUN_ID resumes a run, whose parameters cannot change
            params = [entities.Param(name, str(value)) for name, value in config.flat().items()]
            self._client.log_batch(self._id, params=params)

    def event(self, name: str, **fields: Any) -> None:
        if name in CURVES:
            now = int(time.time() * 1000)
            points = scalars(name, fields).items()
            metrics = [self._entities.Metric(curve, value, now, fields[name]) for curve, value in points]
            self._client.log_batch(self._id, metrics=metrics)
            return
        tags = [self._entities.RunTag(field, str(value)) for field, value in _flat(fields).items()]
        self._client.log_batch(self._id, tags=tags)
        self._ended = name == "end"

    def close(self) -> None:
        self._mlflow.end_run("FINISHED" if self._ended else "FAILED")


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested mappings: the item `python` of the field `versions` becomes `versions.python`."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        flat.update({f"{name}.{key}": item for key, item in inner} or {name: value})
    return flat


class WandB(Reporter):
    """Reporter to Weights & Biases, configured by its environment variables such as WANDB_PROJECT and WANDB_MODE."""

    def __init__(self, config: TrainConfig) -> None:
        """Start a run; if that fails, e.g. without an API key, wandb's exception is raised."""
        wandb = importlib.import_module("wandb")  # imported by name, as MLflow is
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
