"""Batch norm on several ranks: all validate and resume with the same statistics. Oracle: one process; the whole run."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from ranks import REPOSITORY, full, last, launch, train

from allstep.common.checkpoint import load
from allstep.common.config.train_config import DataConfig, StrategyConfig, TrainConfig
from allstep.common.data import datasets
from allstep.common.launch.placement import ALONE
from allstep.common.training.metrics import build_metrics, evaluate
from allstep.common.watch import ProgressState
from allstep.pytorch.models import build_model, import_weights
from allstep.pytorch.strategies.strategy import Single
from allstep.pytorch.worker import Worker

# 2 epochs of 3 steps; the last step of an epoch has a single sample, so one rank has no sample.
DATA = DataConfig(dataset="synthetic", synthetic_samples=17, synthetic_shape=(8, 8, 1))
SIZE = {"depth": 10, "width": 1}
FLAGS = ("--model", "wide-resnet", "--model-depth", SIZE["depth"], "--model-width", SIZE["width"],
         "--dataset", "synthetic", "--synthetic-samples", 17, "--synthetic-shape", 8, 8, 1,
         "--global-batch-size", 8, "--base-lr", 0.001, "--momentum", 0, "--checkpoint-every", 4,
         "--epochs", 2)  # fmt: skip


def test_an_empty_slice_does_not_count():
    result = launch("horovodrun-mpi", 2, REPOSITORY / "tests/pytorch/ranks/batch_norm.py")
    assert result.returncode == 0 and result.stdout.count("all right") == 2, result.output


@pytest.fixture(scope="module", params=["horovod", full("ddp")])
def undisturbed(request, tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("run")
    return request.param, output_dir, train_two(request.param, output_dir)


def train_two(strategy, output_dir, *flags):
    return train("pytorch", "horovodrun-mpi", 2, output_dir, "--strategy", strategy, *FLAGS, *flags)


def test_validates_with_what_is_saved(undisturbed):
    """Oracle: all validation samples in this process, with the statistics of the checkpoint."""
    _, output_dir, events = undisturbed
    dataset = datasets.load(DATA)
    network = build_model("wide-resnet", dataset.input_shape, dataset.num_classes, **SIZE)
    state = load("latest", output_dir / "checkpoints", warn=print)
    import_weights(network, {name.removeprefix("model/"): array for name, array in state.arrays.items()})
    strategy = Single(ALONE, StrategyConfig())
    strategy.init()
    _, optimizer = strategy.wrap(network, torch.optim.SGD(network.parameters()))
    worker = Worker(network, optimizer, TrainConfig(), strategy, torch.device("cpu"), dataset)
    expected = evaluate(worker, dataset.validation, 8, ProgressState(), build_metrics(TrainConfig(), dataset))
    assert last(events, "epoch")["validation_loss"] == pytest.approx(expected.loss, rel=1e-5)


def test_goes_on_as_if_it_had_not_stopped(undisturbed, tmp_path):
    """Compare bit by bit after a resume in the middle of the second epoch."""
    strategy, source, expected = undisturbed
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    received = train_two(strategy, tmp_path, "--resume", "latest")
    assert last(received, "epoch")["validation_loss"] == last(expected, "epoch")["validation_loss"]
    states = [load("latest", run / "checkpoints", warn=print) for run in (source, tmp_path)]
    assert states[0].progress.step == states[1].progress.step == 6
    for name, array in states[0].arrays.items():
        np.testing.assert_array_equal(states[1].arrays[name], array, err_msg=name)
