"""Reports to TensorBoard and, in the background, to experiment trackers.

TensorBoard's event files are written without either framework. MLflow gets flags as parameters, curves as metrics, and
all other fields as tags. Weights & Biases gets flags and start fields as configuration, curves as history, and other
fields as summary.
"""

import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from allstep.common.base.errors import UserError, summary, warn
from allstep.common.config.train_config import TrainConfig
from allstep.common.recipe.progress import Progress
from allstep.common.reporting.base import CURVES, Reporter, output_dir_errors, scalars


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
    """Flatten nested mappings: the item `b` of the field `a` becomes `a.b`."""
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


class TensorBoard(Reporter):
    """Reporter that writes scalars per step to `steps/`, and scalars per epoch to `epochs/`."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        """Open the event files, and let TensorBoard hide what an earlier run reported beyond `progress`."""
        # protobuf makes these classes when their modules are imported.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        self._event, self._summary = Event, Summary
        # Separate files, since TensorBoard hides points by their step, and an epoch's number is below its steps'.
        self._files = {name: _EventFile(directory / f"{name}s") for name in CURVES}
        for file in self._files.values():
            file.write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if progress.step:
            start = SessionLog(status=SessionLog.START)
            for name, completed in (("step", progress.step), ("epoch", progress.position.epoch)):
                self._files[name].write(Event(wall_time=time.time(), step=completed + 1, session_log=start))

    def event(self, name: str, **fields: Any) -> None:
        if name in CURVES:
            points = scalars(name, fields)
            values = [self._summary.Value(tag=curve, simple_value=value) for curve, value in points.items()]
            self._files[name].write(
                self._event(wall_time=time.time(), step=fields[name], summary=self._summary(value=values))
            )

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class _EventFile:
    """New event file in `directory`, each event complete before the next step begins.

    TensorBoard's EventFileWriter imports TensorFlow if that is installed, and writes in a thread, which prints a
    traceback if the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory = directory
        with output_dir_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads the files of a directory in the order of their names.
            self._records = RecordWriter((directory / f"events.out.tfevents.{time.time_ns()}").open("wb"))

    def write(self, event: Any) -> None:
        with output_dir_errors(self._directory):
            self._records.write(event.SerializeToString())
            self._records.flush()

    def close(self) -> None:
        with output_dir_errors(self._directory):
            self._records.close()


MAX_SECONDS_AT_END = 30.0


class Background(Reporter):
    """Reporter that opens another one in a background thread, and passes events on to it in order.

    Training does not wait for the network that the other one may use. If the other reporter fails, a warning is printed
    once, it gets no more events, and the run continues.
    """

    def __init__(self, flag: str, open_reporter: Callable[[], Reporter]) -> None:
        """Open the reporter that `flag` selects and wait until it is ready. Raises UserError if it cannot be opened."""
        self._flag = flag
        self._calls: queue.SimpleQueue[Callable[[Reporter], None] | None] = queue.SimpleQueue()
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_reporter, opened), name=flag, daemon=True)
        self._thread.start()
        try:
            opened.result()
        except Exception as error:
            raise UserError(
                f"expected a run to begin with {flag}, received {summary(error)}; correct its environment variables, "
                f"or leave out {flag}"
            ) from error

    def event(self, name: str, **fields: Any) -> None:
        self._calls.put(lambda reporter: reporter.event(name, **fields))

    def close(self) -> None:
        """Wait until all events have been passed on, for at most `MAX_SECONDS_AT_END`."""
        self._calls.put(lambda reporter: reporter.close())
        self._calls.put(None)
        self._thread.join(MAX_SECONDS_AT_END)
        if self._thread.is_alive():
            self._warn(f"not everything was taken within {MAX_SECONDS_AT_END:g} s; the rest is lost")

    def _run(self, open_reporter: Callable[[], Reporter], opened: Future[None]) -> None:
        try:
            reporter = open_reporter()
        except BaseException as error:  # the thread of __init__ waits for any end of this one
            opened.set_exception(error if isinstance(error, Exception) else RuntimeError(summary(error)))
            return
        opened.set_result(None)
        try:
            while call := self._calls.get():
                call(reporter)
        except Exception as error:
            self._warn(f"{summary(error)}; the run goes on, and reports no more there")

    def _warn(self, message: str) -> None:
        warn(f"{self._flag}: {message}")
