"""The synthetic benchmark on real ranks. Oracle: SciPy's interval of the times the ranks wrote; no time is asserted."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy  # scipy.stats is imported when it is used
from ranks import run

from allstep.commands.compare.synthetic import local_batch, run_steps
from allstep.common.config.data_config import DataConfig
from allstep.common.config.train_config import ScheduleConfig, TrainConfig
from allstep.common.data import datasets

MODULE = ("python", "-m", "allstep.commands.compare.synthetic")
TINY = ("--num-warmup-batches", "2", "--num-batches-per-iter", "2", "--num-iters", "3")
SMALL = ("--synthetic-shape", "12", "12", "1", "--synthetic-classes", "10")
FIGURE = r"(\d+\.\d) \+-(\d+\.\d)"


def check_reported(stdout: str, measured: dict, num_ranks: int) -> None:
    """Check that the printed mean and interval match the slowest rank of each iteration in the ranks' files."""
    rates = [block["num_images"] / max(block["seconds_by_rank"]) for block in measured["blocks"]]
    mean, (low, high) = np.mean(rates), scipy.stats.t.interval(0.95, 2, np.mean(rates), scipy.stats.sem(rates))
    [per_rank] = re.findall(rf"Img/sec per rank: {FIGURE}", stdout)
    [total] = re.findall(rf"Total img/sec on {num_ranks} rank\(s\): {FIGURE}", stdout)
    expected = np.array([mean, (high - low) / 2])
    np.testing.assert_allclose(np.array(total, float), expected, atol=0.051)
    np.testing.assert_allclose(np.array(per_rank, float), expected / num_ranks, atol=0.051)
    assert len(re.findall(r"Iter #\d: ", stdout)) == 3


def test_two_ranks_under_horovodrun(tmp_path):
    output = tmp_path / "out.json"
    command = (
        "horovodrun",
        "-np",
        "2",
        *MODULE,
        "--framework",
        "pytorch",
        "--model",
        "cnn",
        "--batch-size",
        "6",
        *SMALL,
    )
    result = run(*command, *TINY, "--compression", "fp16", "--output", output)
    assert result.returncode == 0, result.output
    measured = json.loads(output.read_text())
    assert [block["num_images"] for block in measured["blocks"]] == [6 * 2 * 2] * 3
    assert all(len(block["seconds_by_rank"]) == 2 for block in measured["blocks"])
    assert len(measured["peak_memory_bytes_by_rank"]) == 2 and min(measured["peak_memory_bytes_by_rank"]) > 2**20
    check_reported(result.stdout, measured, 2)


def test_one_process_with_a_resnet_of_keras(tmp_path):
    output = tmp_path / "out.json"
    images = ("--synthetic-shape", "16", "16", "3", "--synthetic-classes", "10")
    command = (*MODULE, "--framework", "tensorflow", "--model", "resnet18", "--batch-size", "2", *images)
    result = run(*command, *TINY, "--output", output)
    assert result.returncode == 0, result.output
    assert "resnet18, tensorflow, single: 2 images a step on 1 rank(s)" in result.stdout
    check_reported(result.stdout, json.loads(output.read_text()), 1)


def test_a_mistake_is_one_line():
    result = run(*MODULE, "--model", "resnet51")
    assert result.returncode == 2 and result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("allstep: error: ") and "resnet51" in line


@pytest.mark.parametrize(("flag", "value"), [("--num-iters", "0"), ("--output", "/proc/out.json")])
def test_a_mistake_in_a_flag_of_ours_is_one_line_of_one_rank(flag, value):
    result = run("horovodrun", "-np", "2", *MODULE, flag, value)
    [line] = [line for line in result.stderr.splitlines() if "allstep: error: " in line]
    assert f"expected {flag}" in line and value in line and "usage" not in result.output


@pytest.mark.cold
def test_help_names_our_flags_and_imports_no_framework():
    result = run("python", "-X", "importtime", "-m", "allstep.commands.compare.synthetic", "--help")
    assert result.returncode == 0 and "--num-batches-per-iter" in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "tensorflow", "keras", "horovod", "scipy"}


class CountingWorker:
    """Records when a step is started and when its loss is read."""

    framework, device, collectives = "pytorch", "cpu", SimpleNamespace(rank=1, world_size=2)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def train_step(self, batch: object, learning_rate: float) -> CountingWorker:
        self.calls.append("start")
        return self

    def __float__(self) -> float:
        self.calls.append("settle")
        return 0.0

    def parameters(self):
        self.calls.append("read")
        yield "weight", np.zeros(1)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_steps_run_as_in_the_engine_and_nothing_is_left_under_way(in_flight):
    worker = CountingWorker()
    run_steps(worker, None, 5, learning_rate=0.1, steps_in_flight=in_flight)
    assert worker.calls[: in_flight + 2] == ["start"] * (in_flight + 1) + ["settle"]
    assert (worker.calls.count("start"), worker.calls.count("settle"), worker.calls[-1]) == (5, 5, "read")


def test_batch_is_this_ranks_slice_of_the_first_global_batch():
    dataset = datasets.load(DataConfig(dataset="synthetic", synthetic_shape=(6, 6, 1), synthetic_samples=100))
    batch = local_batch(dataset, TrainConfig(schedule=ScheduleConfig(global_batch_size=7)), CountingWorker())
    images, labels = dataset.train.read(np.arange(3, 7), epoch=0)
    assert np.array_equal(batch.inputs.numpy(), images) and np.array_equal(batch.targets.numpy(), labels)
    assert (batch.num_samples, batch.num_global, batch.loss_weight) == (4, 7, 2 / 7)
