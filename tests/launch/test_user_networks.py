"""Users' networks, losses and samples in real launches. Oracle: an uninterrupted run, or the other framework."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import REPOSITORY, events, last, launch, train

NETWORKS = {
    "pytorch": """
from torch import nn
def build(input_shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, num_classes)
    )
def broken(input_shape, num_classes):
    raise ValueError("no network today")
""",
    "tensorflow": """
import keras
from keras import layers
def build(input_shape, num_classes):
    return keras.Sequential([
        layers.Input(input_shape), layers.Flatten(), layers.Dense(32), layers.BatchNormalization(), layers.ReLU(),
        layers.Dropout(0.5), layers.Dense(num_classes),
    ])
""",
}
# The last batch has only one of the 1,437 samples, so one of two ranks has none.
FLAGS = ("--global-batch-size", 359, "--base-lr", 0.05, "--checkpoint-every", 3, "--ema", 0.9)


@pytest.mark.parametrize("framework", NETWORKS)
def test_goes_on_as_if_it_had_not_stopped(framework, tmp_path):
    """Dropout draws the same after a resume, even if only rank 0 has the initial weights."""
    file = tmp_path / "mine.py"
    file.write_text(NETWORKS[framework])
    model = ("--model", f"{file}:build")
    undisturbed = train(framework, "horovodrun-mpi", 2, tmp_path / "a", *FLAGS, *model, "--epochs", 2)
    steps = sorted((tmp_path / "a" / "checkpoints").glob("step-*"))
    assert [path.name for path in steps] == ["step-00000006", "step-00000009", "step-00000010"]
    resume = ("--resume", steps[0], "--epochs", 2)
    resumed = train(framework, "horovodrun-mpi", 2, tmp_path / "b", *FLAGS, *model, *resume)
    assert last(resumed, "end")["weights_checksum"] == last(undisturbed, "end")["weights_checksum"]
    assert last(resumed, "epoch")["validation_loss"] == last(undisturbed, "epoch")["validation_loss"]


KERAS_NORM = """
from keras import Sequential, layers
def build(input_shape, num_classes):
    return Sequential([
        layers.Input(input_shape), layers.Flatten(), layers.Dense(32), layers.BatchNormalization(), layers.ReLU(),
        layers.Dense(num_classes),
    ])
"""


def test_devices_that_share_variables_keep_the_statistics_of_keras_own_batch_norm(tmp_path):
    """Oracle: mirrored, whose devices have separate statistics, which are equal when averaged at the end."""
    file = tmp_path / "mine.py"
    file.write_text(KERAS_NORM)
    flags = ("--model", f"{file}:build", "--num-devices", 2, "--epochs", 1, "--global-batch-size", 128)
    mirrored, shared = (
        last(train("tensorflow", "alone", 1, tmp_path / strategy, *flags, "--strategy", strategy), "epoch")
        for strategy in ("mirrored", "central-storage")
    )
    assert shared["validation_loss"] == pytest.approx(mirrored["validation_loss"], rel=1e-4)


SAMPLES = """
import numpy as np
def load():
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 5)).astype(np.float32)
    y = x @ random.normal(size=(5, 2)).astype(np.float32)
    return x[:90], y[:90], x[90:], y[90:]
"""


def test_numbers_are_predicted_alike_in_both_frameworks(tmp_path):
    """Regression reports the mean absolute error instead of the accuracy, and the best checkpoint has the smallest."""
    file = tmp_path / "mine.py"
    file.write_text(SAMPLES)
    flags = ("--dataset", f"{file}:load", "--model", "mlp", "--loss", "huber", "--epochs", 3, "--global-batch-size", 30)
    epochs = {}
    for framework in NETWORKS:
        result = launch(
            "horovodrun-mpi", 2, f"{framework}/train.py", *map(str, (*flags, "--output-dir", tmp_path / framework))
        )
        assert result.returncode == 0, result.output
        found = [event for event in events(tmp_path / framework) if event["event"] == "epoch"]
        assert not any("validation_accuracy" in event for event in found)
        assert f"Validation MAE = {found[-1]['validation_mae']:.3f}" in result.output
        epochs[framework] = [[event[f"validation_{name}"] for name in ("loss", "mae")] for event in found]
    assert epochs["pytorch"][-1][0] < 0.8 * epochs["pytorch"][0][0]
    np.testing.assert_allclose(epochs["tensorflow"], epochs["pytorch"], rtol=1e-4)
    best = launch("alone", 1, "pytorch/train.py", *map(str, flags), "--output-dir", tmp_path / "pytorch",
                  "--resume", "best", "--epochs", "3")  # fmt: skip
    assert best.returncode == 0, best.output  # the third epoch was the best, so no work is left
    assert "Epoch =" not in best.output


def test_a_file_that_does_not_build_ends_all_ranks(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(NETWORKS["pytorch"])
    result = launch("horovodrun-gloo", 2, "pytorch/train.py", "--model", f"{file}:broken")
    assert result.returncode == 2, result.output
    assert result.output.count("allstep: error: ") == 1 and "ValueError: no network today" in result.output
    assert result.output.count(f"allstep: --model imports {file}") == 1 and "Traceback" not in result.output


def test_the_example_is_the_same_in_both_frameworks(tmp_path):
    example = REPOSITORY / "examples" / "my_model.py"
    flags = ("--model", f"{example}:build", "--loss", f"{example}:loss", "--epochs", 1, "--log-every", 1)
    curves = []
    for framework in NETWORKS:
        found = train(framework, "alone", 1, tmp_path / framework, *flags, "--global-batch-size", 359)
        curves.append([event["loss"] for event in found if event["event"] == "step"])
    np.testing.assert_allclose(*curves, rtol=1e-5)
