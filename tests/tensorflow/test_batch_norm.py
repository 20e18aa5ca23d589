"""Batch norm on several ranks: all validate and resume with the same statistics. Oracle: one process; the whole run."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from ranks import REPOSITORY, full, last, launch, train

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import load
from allstep.common.config.train_config import DataConfig, StrategyConfig, TrainConfig
from allstep.common.data import datasets
from allstep.common.launch.placement import ALONE
from allstep.common.training.metrics import build_metrics, evaluate
from allstep.common.watch import ProgressState
from allstep.tensorflow.models import build_model, import_weights
from allstep.tensorflow.strategies.batch_norm import synchronise_batch_norm
from allstep.tensorflow.strategies.distribute import CentralStorage, DistributedStrategy
from allstep.tensorflow.strategies.strategy import Single
from allstep.tensorflow.worker import Worker

# 2 epochs of 3 steps; the last step of an epoch has a single sample, so one rank has no sample.
DATA = DataConfig(dataset="synthetic", synthetic_samples=17, synthetic_shape=(8, 8, 1))
SIZE = {"depth": 10, "width": 1}
FLAGS = ("--model", "wide-resnet", "--model-depth", SIZE["depth"], "--model-width", SIZE["width"],
         "--dataset", "synthetic", "--synthetic-samples", 17, "--synthetic-shape", 8, 8, 1,
         "--global-batch-size", 8, "--base-lr", 0.001, "--momentum", 0, "--checkpoint-every", 4)  # fmt: skip
JOBS = {
    "horovod": ("horovodrun-mpi", 2),
    "multi-worker-mirrored": ("horovodrun-gloo", 2),
    "mirrored": ("alone", 1, "--num-devices", 2),
    "central-storage": ("alone", 1, "--num-devices", 2),
}


def train_by(strategy: str, output_dir: Path, *flags) -> list[dict]:
    launcher, num_ranks, *own = JOBS[strategy]
    return train("tensorflow", launcher, num_ranks, output_dir, "--strategy", strategy, *own, *FLAGS, *flags)


def assert_validated_with_what_is_saved(events: list[dict], output_dir: Path) -> None:
    """Oracle: all validation samples in this process, with the statistics of the checkpoint."""
    dataset = datasets.load(DATA)
    model = build_model("wide-resnet", dataset.input_shape, dataset.num_classes, **SIZE)
    state = load("latest", output_dir / "checkpoints", warn=print)
    import_weights(model, {name.removeprefix("model/"): array for name, array in state.arrays.items()})
    strategy = Single(ALONE, StrategyConfig())
    strategy.init()
    _, optimizer = strategy.wrap(model, keras.optimizers.SGD(0.1))
    worker = Worker(model, optimizer, TrainConfig(), strategy, "/CPU:0", dataset)
    expected = evaluate(worker, dataset.validation, 8, ProgressState(), build_metrics(TrainConfig(), dataset))
    assert last(events, "epoch")["validation_loss"] == pytest.approx(expected.loss, rel=1e-5)


def test_keras_batch_norms_over_the_global_batch():
    """Oracle: Keras' own layers in one process."""
    program = REPOSITORY / "tests/tensorflow/programs/keras_batch_norms.py"
    results = (launch("alone", 1, program, "single"), launch("horovodrun-mpi", 2, program, "horovod"))
    alone, over_ranks = (
        json.loads(re.findall(r"^(?:\[1,0\]<stdout>:)?(\{.*\})", one.stdout, re.M)[0]) for one in results
    )
    for name, values in alone.items():
        for expected, found in zip(values, over_ranks[name], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=name)


class Doubled(keras.layers.BatchNormalization):
    def call(self, inputs, **options):
        return keras.ops.add(super().call(inputs, **options), inputs)


def test_a_batch_norm_that_computes_something_else_is_refused():
    model = keras.Sequential([keras.Input((3,)), Doubled(name="mine")])
    with pytest.raises(UserError, match="received mine of class Doubled, which has a call of its own; leave --sync-b"):
        synchronise_batch_norm(model, lambda values, name: values, wanted=True)
    synchronise_batch_norm(model, lambda values, name: values, wanted=False)


class Several(Single):
    """Stand-in for strategies of several ranks, whose steps ask the others."""

    def sum_over_ranks(self, tensor, name):
        return tensor


class OfDevices(Several):
    asks_in_loops = DistributedStrategy.asks_in_loops


@pytest.mark.parametrize(
    ("kind", "flags", "refused"),
    [
        (Several, {"compile": True}, "--compile"),
        (Single, {"slices": 2}, "--slices"),
        (Single, {"compile": True}, ""),
        (OfDevices, {"accumulate_steps": 2}, "--accumulate-steps"),
        (Several, {"accumulate_steps": 2}, ""),
    ],
)
def test_a_synchronised_batch_norm_that_cannot_ask_the_others_is_refused(kind, flags, refused):
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(name="mine", synchronized=True)])
    strategy = kind(ALONE, StrategyConfig(**flags))
    line = f"expected a network without BatchNormalization.* for {refused}, received mine; leave synchronized or"
    with pytest.raises(UserError, match=line) if refused else contextlib.nullcontext():
        strategy.wrap(model, keras.optimizers.SGD(0.1))


def test_an_empty_slice_does_not_count():
    scripts = REPOSITORY / "tests/tensorflow/ranks"
    result = launch("horovodrun-mpi", 2, scripts / "lean.py", scripts / "batch_norm.py")
    assert result.returncode == 0 and result.stdout.count("all right") == 2, result.output


@pytest.mark.full
def test_goes_on_as_if_it_had_not_stopped(tmp_path):
    """Resume in the middle of the second epoch."""
    source, resumed = tmp_path / "source", tmp_path / "resumed"
    expected = train_by("horovod", source, "--epochs", 2)
    assert_validated_with_what_is_saved(expected, source)
    shutil.copytree(source, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    received = train_by("horovod", resumed, "--epochs", 2, "--resume", "latest")
    losses = [last(events, "epoch")["validation_loss"] for events in (expected, received)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    states = [load("latest", run / "checkpoints", warn=print) for run in (source, resumed)]
    assert states[0].progress.step == states[1].progress.step == 6
    for name, array in states[0].arrays.items():
        np.testing.assert_allclose(states[1].arrays[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train("tensorflow", "alone", 1, tmp_path_factory.mktemp("alone"), *FLAGS, "--epochs", 1, "--log-every", 1)


@pytest.mark.parametrize(
    "strategy", ["horovod", full("mirrored"), full("multi-worker-mirrored"), full("central-storage")]
)
def test_over_the_global_batch_any_ranks_train_the_curve_of_one(strategy, alone, tmp_path):
    events = train_by(strategy, tmp_path, "--epochs", 1, "--log-every", 1, "--sync-batch-norm")
    losses = [[event["loss"] for event in run if event["event"] == "step"] for run in (alone, events)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    validation = [last(run, "epoch")["validation_loss"] for run in (alone, events)]
    assert validation[1] == pytest.approx(validation[0], rel=1e-4)


@pytest.mark.parametrize("strategy", ["mirrored", full("multi-worker-mirrored"), full("central-storage")])
def test_validates_with_what_is_saved(strategy, tmp_path):
    events = train_by(strategy, tmp_path, "--epochs", 1)
    assert_validated_with_what_is_saved(events, tmp_path)


def test_central_storage_refuses_running_statistics_within_a_loop():
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    strategy = CentralStorage(ALONE, StrategyConfig(num_devices=2, accumulate_steps=2))
    with pytest.raises(UserError, match="--strategy central-storage, received 2 and .*/moving_mean; use mirrored"):
        strategy.wrap(model, keras.optimizers.SGD())
