"""Losses and metrics of both frameworks. Oracle: their formulas in NumPy, in float64."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import LOSSES, default_loss
from allstep.common.data.datasets import Dataset
from allstep.common.data.datasets.base import ArraySplit
from allstep.common.training.loss_trial import LossCheck
from allstep.pytorch import losses as pytorch_losses
from allstep.tensorflow import losses as tensorflow_losses

RANDOM = np.random.default_rng(0)
SMOOTHING = 0.1


def log_softmax(outputs: np.ndarray) -> np.ndarray:
    return outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))


def cross_entropy(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    logs = log_softmax(outputs)
    own = np.take_along_axis(logs, targets[..., None], -1)[..., 0]
    return -(1 - SMOOTHING) * own - SMOOTHING * logs.mean(-1)


FORMULAS = {
    "cross-entropy": cross_entropy,
    "mse": lambda outputs, targets: (outputs - targets) ** 2,
    "mae": lambda outputs, targets: np.abs(outputs - targets),
    "huber": lambda outputs, targets: np.where(
        np.abs(outputs - targets) < 1, (outputs - targets) ** 2 / 2, np.abs(outputs - targets) - 0.5
    ),
    "bce": lambda outputs, targets: (
        -targets * np.log(1 / (1 + np.exp(-outputs))) - (1 - targets) * np.log(1 / (1 + np.exp(outputs)))
    ),
}
CASES = [(name, task) for name, tasks in LOSSES.items() for task in tasks]


def samples(name: str, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and targets of five samples, with two numbers, three classes or four tokens."""
    if task == "regression":
        targets = RANDOM.integers(0, 2, (5, 2)) if name == "bce" else RANDOM.normal(size=(5, 2))
        return 2 * RANDOM.normal(size=(5, 2)).astype(np.float32), targets.astype(np.float32)
    shape = (5, 4) if task == "next-token" else (5,)
    return RANDOM.normal(size=(*shape, 3)).astype(np.float32), RANDOM.integers(0, 3, shape)


def measured(build: str, arguments: tuple, outputs: np.ndarray, targets: np.ndarray) -> list[float]:
    """Return the value in PyTorch and in TensorFlow."""
    return [
        float(getattr(pytorch_losses, build)(*arguments)(torch.tensor(outputs), torch.tensor(targets))),
        float(getattr(tensorflow_losses, build)(*arguments)(tf.constant(outputs), tf.constant(targets))),
    ]


def test_labels_may_be_shares_of_the_classes():
    """Oracle for labels of --mixup: the cross-entropies of the classes, weighted by their shares."""
    outputs, classes = samples("cross-entropy", "classification")
    shares = RANDOM.dirichlet(np.ones(3), len(classes)).astype(np.float32)
    of_each = [cross_entropy(outputs.astype(np.float64), np.full(len(classes), number)) for number in range(3)]
    expected = (shares * np.stack(of_each, axis=1)).sum()
    assert measured("build_loss", ("cross-entropy", SMOOTHING), outputs, shares) == pytest.approx([expected] * 2, 1e-5)


WEIGHTS = (0.5, 2.0, 0.0)


@pytest.mark.parametrize("mixed", [False, True])
def test_weights_of_classes(mixed):
    """Oracles: torch's cross_entropy of each sample; for plain labels also Keras' weight of each sample."""
    outputs, classes = samples("cross-entropy", "classification")
    labels = RANDOM.dirichlet(np.ones(3), len(classes)).astype(np.float32) if mixed else classes
    for smoothing in (0.0, SMOOTHING):
        expected = torch.nn.functional.cross_entropy(
            torch.tensor(outputs), torch.tensor(labels), torch.tensor(WEIGHTS), reduction="none",
            label_smoothing=smoothing,
        )  # fmt: skip
        arguments = ("cross-entropy", smoothing)
        found = [
            float(pytorch_losses.build_loss(*arguments, torch.tensor(WEIGHTS))(*map(torch.tensor, (outputs, labels)))),
            float(tensorflow_losses.build_loss(*arguments, WEIGHTS)(*map(tf.constant, (outputs, labels)))),
        ]
        assert found == pytest.approx([float(expected.sum())] * 2, 1e-5)
    if not mixed:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        value = float(loss(classes, outputs, sample_weight=np.array(WEIGHTS)[classes]))
        assert float(tensorflow_losses.build_loss("cross-entropy", 0.0, WEIGHTS)(
            tf.constant(outputs), tf.constant(classes))) == pytest.approx(value, 1e-5)  # fmt: skip


@pytest.mark.parametrize(("name", "task"), CASES)
def test_sums_over_samples(name, task):
    outputs, targets = samples(name, task)
    of_elements = FORMULAS[name](outputs.astype(np.float64), targets)
    expected = of_elements.reshape(5, -1).mean(1).sum()
    smoothing = SMOOTHING if name == "cross-entropy" else 0.0
    np.testing.assert_allclose(measured("build_loss", (name, smoothing), outputs, targets), expected, rtol=1e-5)


@pytest.mark.parametrize("returned", ["outputs[:, 0]", "outputs", "outputs.sum() if hasattr(outputs, 'sum') else 3.0"])
def test_a_loss_of_the_users_own(returned, tmp_path):
    """A loss function may return a mean, or a value per sample or per element, and nothing else."""
    path = tmp_path / "mine.py"
    path.write_text(f"def loss(outputs, targets):\n    return {returned}\n")
    outputs, targets = samples("mse", "regression")
    name = f"{path}:loss"
    torch_loss, keras_loss = pytorch_losses.build_loss(name), tensorflow_losses.build_loss(name)
    if "sum" in returned:
        assert float(torch_loss(torch.tensor(outputs), torch.tensor(targets))) == pytest.approx(5 * outputs.sum())
        with pytest.raises(UserError, match=r"loss\(\) of --loss to return the mean loss, .* received 3.0"):
            keras_loss(tf.constant(outputs), tf.constant(targets))
        return
    expected = outputs[:, 0].sum() if "0" in returned else outputs.mean(1).sum()
    np.testing.assert_allclose(measured("build_loss", (name,), outputs, targets), expected, rtol=1e-5, atol=1e-6)


FILE = Path(__file__).parent / "programs" / "losses.py"


@pytest.mark.parametrize(("name", "formula"), [
    ("partial", lambda apart: 2 * apart**2),
    ("module", lambda apart: apart**2),
    ("kind", lambda apart: apart**2),
    ("each", lambda apart: apart**2),
    ("function", FORMULAS["huber"]),
])  # fmt: skip
def test_losses_that_are_objects_of_the_frameworks(name, formula):
    outputs, targets = samples("mse", "regression")
    of_elements = formula(outputs.astype(np.float64), targets) if name == "function" else formula(outputs - targets)
    expected = of_elements.mean(1).sum()
    np.testing.assert_allclose(measured("build_loss", (f"{FILE}:{name}",), outputs, targets), expected, rtol=1e-5)


def test_keras_losses_get_the_targets_first():
    outputs, targets = (RANDOM.dirichlet(np.ones(3), 5).astype(np.float32) for _ in range(2))
    loss = tensorflow_losses.build_loss(f"{FILE}:asymmetric")
    expected = (targets * np.log(targets / outputs)).sum()
    assert float(loss(tf.constant(outputs), tf.constant(targets))) == pytest.approx(expected, 1e-4)


def test_a_loss_with_parameters_is_refused():
    with pytest.raises(UserError, match="Sequential of --loss has parameters"):
        pytorch_losses.build_loss(f"{FILE}:learned")


IN_PARTS = {
    pytorch_losses: (
        *("sum", "sum_partial", "weights", "weights_partial", "ignored", "compares", "sum_of_probabilities"),
        *("each", "probabilities", "fails"),
    ),
    tensorflow_losses: ("sum", "compares", "each"),
}


@pytest.mark.parametrize(("losses", "name"), [(losses, name) for losses, names in IN_PARTS.items() for name in names])
def test_losses_that_depend_on_how_a_batch_is_cut(losses, name, capsys):
    of_classes = name in ("weights", "weights_partial", "ignored", "compares")
    task = "classification" if of_classes else "regression"
    split = ArraySplit(np.zeros((9, 2), np.float32), RANDOM.uniform(size=(9, 3)).astype(np.float32))
    dataset = Dataset(split, split, (2,), 3, task=task)
    parallel = SimpleNamespace(num_slices=None, accumulate_steps=1)
    for num_ranks, num_devices in ((1, 1), (2, 1), (1, 2)):
        placement = SimpleNamespace(world_size=num_ranks, rank=0)
        strategy = SimpleNamespace(num_local_devices=num_devices)
        config = SimpleNamespace(loss=name, parallel=parallel)
        run: Any = SimpleNamespace(config=config, placement=placement, strategy=strategy, dataset=dataset)
        is_cut = num_ranks * num_devices > 1 and name not in ("each", "probabilities", "fails")
        with pytest.raises(UserError, match="for their parts, as ranks") if is_cut else contextlib.nullcontext():
            LossCheck(losses.measure_of(f"{FILE}:{name}")).check(run)
        is_told = num_ranks * num_devices > 1 and name == "fails"
        assert ("is not tried on the parts of a batch: expected" in capsys.readouterr().err) == is_told


def test_weights_of_classes_count_for_each_sample():
    outputs, targets = samples("cross-entropy", "classification")
    loss = pytorch_losses.build_loss(f"{FILE}:weights_each")
    log = log_softmax(outputs.astype(np.float64))[np.arange(5), targets]
    assert float(loss(torch.tensor(outputs), torch.tensor(targets))) == pytest.approx(
        -((targets + 1) * log).sum(), 1e-5
    )


def test_each_task_has_a_loss_of_its_own():
    assert [default_loss(task) for task in ("classification", "regression", "next-token")] == [
        "cross-entropy",
        "mse",
        "cross-entropy",
    ]
