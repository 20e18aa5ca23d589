"""Reports to MLflow and Weights & Biases. Oracles: MLflow's reader of its local store, and the records that wandb
writes offline, read with its protocol buffers."""

from __future__ import annotations

import struct
import sys
import threading
import time
from typing import Any

import pytest
from requirements import need_packages

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.launch.placement import ALONE
from allstep.common.recipe.progress import Progress
from allstep.common.reporting import open_reporter
from allstep.common.reporting.base import Reporter
from allstep.common.reporting.trackers import Background

LOSSES = [0.5, 0.25, 0.125]


def tell(*, until_the_end: bool = True, **output: bool) -> None:
    """Report a run of three steps and an epoch as ranks 0 and 1."""
    for rank in (0, 1):
        reporter = open_reporter(TrainConfig(output=OutputConfig(**output)), rank, Progress())
        reporter.event("start", framework="pytorch", world_size=2, versions={"python": "3"})
        for step, loss in enumerate(LOSSES, 1):
            reporter.event("step", step=step, epoch=step / 3, learning_rate=0.1, loss=loss)
        reporter.event(
            "epoch", epoch=1, train_loss=0.3, validation_loss=0.2, validation_accuracy=0.9, epoch_seconds=1.0,
            cumulative_seconds=1.0, images_per_second=10.0,
        )  # fmt: skip
        if until_the_end:
            reporter.event("end", weights_checksum="abc", peak_memory_bytes=1)
        reporter.close()


@pytest.mark.parametrize("until_the_end", [True, False])
def test_mlflow_has_one_run_with_all_of_it(until_the_end, tmp_path, monkeypatch):
    need_packages("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "digits")
    tell(until_the_end=until_the_end, mlflow=True)
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == ("FINISHED" if until_the_end else "FAILED")
    assert (run.data.params["optimizer"], run.data.tags["versions.python"]) == ("sgd", "3")
    assert run.data.tags.get("weights_checksum") == ("abc" if until_the_end else None)
    history = client.get_metric_history(run.info.run_id, "step/loss")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(LOSSES, 1))
    assert run.data.metrics["epoch/validation_accuracy"] == 0.9


@pytest.mark.launch
def test_wandb_has_one_run_with_all_of_it(tmp_path, monkeypatch):
    need_packages("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tell(wandb=True)
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline, records = time.monotonic() + 30, []
    while time.monotonic() < deadline and not any(record.HasField("exit") for record in records):
        time.sleep(0.1)  # another process writes the file
        records = wandb_records(file.read_bytes())
    rows = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["step/loss"]) for row in rows if "step" in row] == [
        (str(step), str(loss)) for step, loss in enumerate(LOSSES, 1)
    ]
    assert [row["epoch/validation_accuracy"] for row in rows if "epoch" in row] == ["0.9"]
    [ended] = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert ended == 0


def wandb_records(data: bytes) -> list[Any]:
    """Return the records of a file in the format of LevelDB's logs: blocks of 32 KiB, with records split into parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, parts, placement = [], b"", 7
    while placement < len(data):
        if -placement % 2**15 < 7:  # no room for another header in this block
            placement += -placement % 2**15
        length, kind = struct.unpack_from("<HB", data, placement + 4)
        parts += data[placement + 7 : placement + 7 + length]
        placement += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


class Failing(Reporter):
    """Receives one event, and fails at the next."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def event(self, name: str, **fields: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.heard.append(name)
        if len(self.heard) == 2:
            raise ConnectionError("gone\nthe server is away")


def test_one_that_fails_is_said_once_and_the_run_goes_on(capfd):
    failing = Failing()
    reporter = Background("--mlflow", lambda: failing)
    for name in ("start", "step", "epoch"):
        reporter.event(name)
    reporter.close()
    assert failing.heard == ["start", "step"]
    assert capfd.readouterr().err == (
        "allstep: warning: --mlflow: ConnectionError: the server is away; the run goes on, and reports no more there\n"
    )


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
def test_one_that_cannot_begin_ends_the_run_in_a_line(kind):
    def unreachable() -> Reporter:
        raise kind("no server")

    with pytest.raises(UserError, match=f"a run to begin with --wandb, received .*{kind.__name__}: no server; "):
        Background("--wandb", unreachable)


@pytest.mark.parametrize(("flag", "package"), [("--mlflow", "mlflow-skinny"), ("--wandb", "wandb")])
def test_a_package_that_is_not_there(flag, package, monkeypatch):
    monkeypatch.setitem(sys.modules, flag.removeprefix("--"), None)  # makes the import fail
    with pytest.raises(UserError, match=f"expected the package .* with {flag}, received none; pip install {package}$"):
        parse(("single",), ALONE, [flag])
