"""Validation metrics on 1, 2 and 3 ranks. Oracle: scikit-learn, of all samples at once."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy_ranks import Group, Job, ThreadCollectives, of, train
from sklearn import metrics as sk

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import METRICS, metric_name, metrics_of
from allstep.common.checkpoint import load_manifest
from allstep.common.config.train_config import OutputConfig, TrainConfig
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.reporting.base import first_metric
from allstep.common.reporting.trackers import scalars
from allstep.common.training.metrics import Metric, Metrics, Tally

RANDOM = np.random.default_rng(0)
CLASSES = 7  # class 5 is never a target, class 6 neither a target nor predicted
LABELS = RANDOM.integers(0, 5, 100)
LOGITS = RANDOM.normal(size=(100, CLASSES)).astype(np.float32) + 2 * np.eye(CLASSES, dtype=np.float32)[LABELS]
LOGITS[:, 6] = -9
NUMBERS = (1e6 + RANDOM.normal(size=(100, 3)) * (1, 5, 0.1)).astype(np.float64)
FORECASTS = NUMBERS + RANDOM.normal(size=(100, 3))


def dataset(targets: np.ndarray, task: str, num_classes: int) -> Dataset:
    split = ArraySplit(np.zeros((len(targets), 2), np.float32), targets)
    return Dataset(split, split, (2,), num_classes, input_type="float32", task=task)


def measured(names, data: Dataset, outputs: np.ndarray, num_ranks: int = 1) -> dict:
    """Return the metrics of ranks that have unequal parts of the samples, in batches of 9 at most."""
    targets, group = data.validation.targets, Group(num_ranks)

    def one(rank: int) -> dict:
        collectives = ThreadCollectives(group, rank, num_ranks) if num_ranks > 1 else OneRank()
        found = Metrics(names, data, names[0])
        tally = Tally(found, 1)
        ends = np.cumsum([0, *(60, 40, 0)[: num_ranks - 1], 100])
        own = range(ends[rank], min(ends[rank + 1], 100))
        for begin in range(0, max(len(own), 1), 9):
            part = own[begin : begin + 9] or range(1)
            tally.add(0, outputs[part.start : part.stop], targets[part.start : part.stop], counts=len(own) > 0)
        return found.compute(tally.totals(collectives))

    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(one, range(num_ranks)))
    assert all(result == results[0] for result in results)
    return results[0]


def averages(name: str, function) -> dict:
    predicted = LOGITS.argmax(1)
    of_classes = function(LABELS, predicted, average=None, labels=range(CLASSES), zero_division=0).tolist()
    macro, weighted = (function(LABELS, predicted, average=kind, zero_division=0) for kind in ("macro", "weighted"))
    return {name: macro, f"{name}-weighted": weighted, f"{name}-per-class": of_classes}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_classes_as_scikit_learn_has_them(num_ranks):
    predicted, odds = LOGITS.argmax(1), np.exp(LOGITS.astype(float))
    odds /= odds.sum(1, keepdims=True)
    expected = {
        "accuracy": sk.accuracy_score(LABELS, predicted),
        "top-2": sk.top_k_accuracy_score(LABELS, LOGITS, k=2, labels=range(CLASSES)),
        "top-5": sk.top_k_accuracy_score(LABELS, LOGITS, k=5, labels=range(CLASSES)),
        "balanced-accuracy": sk.recall_score(LABELS, predicted, labels=range(5), average="macro"),
        **averages("precision", sk.precision_score),
        **averages("recall", sk.recall_score),
        **averages("f1", sk.f1_score),
        "confusion-matrix": sk.confusion_matrix(LABELS, predicted, labels=range(CLASSES)).tolist(),
        "perplexity": math.exp(sk.log_loss(LABELS, odds, labels=range(CLASSES))),
    }
    assert {*expected, "mae", "rmse", "r2"} == {*METRICS, "top-2"}
    found = measured(list(expected), dataset(LABELS, "classification", CLASSES), LOGITS, num_ranks)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name.replace("-", "_")], value, 1e-6 if name == "perplexity" else 1e-12)
    tokens = dataset(LABELS.reshape(20, 5), "next-token", CLASSES)
    of_tokens = measured(list(expected), tokens, LOGITS.reshape(20, 5, CLASSES))
    assert of_tokens["confusion_matrix"] == expected["confusion-matrix"]
    assert of_tokens["perplexity"] == pytest.approx(expected["perplexity"])


def test_a_network_may_predict_tokens_that_the_data_set_lacks():
    predicted, names = LOGITS.argmax(1), ["accuracy", "f1", "f1-per-class", "confusion-matrix"]
    assert predicted.max() == 5  # labels end with 4
    data = dataclasses.replace(dataset(LABELS.reshape(20, 5), "next-token", 5), num_outputs=CLASSES)
    found = measured(names, data, LOGITS.reshape(20, 5, CLASSES))
    assert found["f1"] == pytest.approx(sk.f1_score(LABELS, predicted, average="macro", zero_division=0))
    options = {"average": None, "labels": range(5), "zero_division": 0}
    assert found["f1_per_class"] == pytest.approx(sk.f1_score(LABELS, predicted, **options))
    assert found["confusion_matrix"] == sk.confusion_matrix(LABELS, predicted, labels=range(5)).tolist()


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_tokens_whose_outputs_stay_on_the_device(framework):
    """Oracle: the metrics of all outputs. Outputs are equal in places, and targets among them."""
    logits, targets = LOGITS.round().reshape(20, 5, CLASSES), LABELS.reshape(20, 5)
    data, names = dataset(targets, "next-token", CLASSES), [*METRICS][:-3] + ["top-2"]
    columns = importlib.import_module(f"allstep.{framework}.losses").scores(*map(to(framework), (logits, targets)))
    of_scores = Metrics(names, data, names[0], of_scores=True)
    tally = Tally(of_scores, 1)
    tally.add(0, columns.numpy(), targets)
    expected = measured(names, data, logits)
    found = of_scores.compute(tally.totals(OneRank()))
    assert found.pop("perplexity") == pytest.approx(expected.pop("perplexity"), rel=1e-6) and found == expected


def to(framework: str):
    module = importlib.import_module({"pytorch": "torch"}.get(framework, framework))
    return module.from_numpy if framework == "pytorch" else module.constant


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_numbers_as_scikit_learn_has_them(num_ranks):
    """They are far from 0, where squares of numbers themselves would cancel."""
    data = dataset(NUMBERS, "regression", 3)
    expected = {
        "mae": sk.mean_absolute_error(NUMBERS, FORECASTS),
        "rmse": sk.root_mean_squared_error(NUMBERS, FORECASTS),
        "r2": sk.r2_score(NUMBERS, FORECASTS),
    }
    assert measured(list(expected), data, FORECASTS, num_ranks) == pytest.approx(expected, rel=1e-9)
    same = dataset(np.ones((4, 1)), "regression", 1)
    assert measured(["r2"], same, np.ones((4, 1))) == {"r2": 1.0} == {"r2": sk.r2_score([1, 1], [1, 1])}
    assert measured(["r2"], same, np.zeros((4, 1))) == {"r2": 0.0} == {"r2": sk.r2_score([1, 1], [0, 0])}


def test_equal_outputs_are_no_hits():
    data = dataset(np.array([0, 1, 6]), "classification", CLASSES)
    assert measured(["top-2"], data, np.zeros((3, CLASSES))) == {"top_2": 2 / 3}


def test_labels_with_bce_have_the_right_sign():
    labels = np.array([[0.0, 1.0], [1.0, 1.0]])
    assert measured(["accuracy"], dataset(labels, "regression", 2), np.array([[-1, 2], [-1, 2.0]])) == {
        "accuracy": 0.75
    }


METRIC = Path(__file__).parent / "programs" / "user_metric.py"


def test_a_metric_of_the_users_own_on_ranks(tmp_path):
    flags = ("--epochs", 2, "--metrics", f"{METRIC}:worst", f"{METRIC}:Spread", "top-3", "confusion-matrix")
    one, three = (train(ranks, tmp_path / str(ranks), *flags, "--best-by", f"{METRIC}:worst") for ranks in (1, 3))
    for name in ("worst", "Spread", "top_3", "confusion_matrix", "accuracy"):
        field = f"validation_{name}"
        np.testing.assert_allclose(of("epoch", one, field), of("epoch", three, field), rtol=1e-5)
    assert np.sum(of("epoch", one, "validation_confusion_matrix")[0]) == 37
    last = of("epoch", one, "validation_worst")[-1]
    assert load_manifest("latest", tmp_path / "1" / "checkpoints").metric == -last  # lower is better


def test_best_by_chooses_the_checkpoint_and_stays(tmp_path):
    losses = of("epoch", train(1, tmp_path, "--epochs", 2, "--best-by", "loss", "--base-lr", 1.0), "validation_loss")
    assert load_manifest("best", tmp_path / "checkpoints").metric == -min(losses)
    with pytest.raises(UserError, match="expected --best-by loss, by which the best so far was chosen, received none"):
        train(1, tmp_path, "--epochs", 3, "--resume", "latest")


def test_reports_have_numbers_and_the_line_the_first():
    fields = {
        "validation_loss": 1.0,
        "validation_f1_per_class": [0.5],
        "validation_f1": 0.25,
        "validation_accuracy": 0.5,
    }
    points = scalars("epoch", {"epoch": 1, **fields, "validation_samples": 3, "ema_validation_f1": 0.75})
    assert points == {
        "epoch/validation_loss": 1.0,
        "epoch/validation_f1": 0.25,
        "epoch/validation_accuracy": 0.5,
        "epoch/ema_validation_f1": 0.75,
    }
    assert first_metric(fields) == ", Validation F1 = 0.250"
    assert first_metric({"validation_accuracy": 0.5, "validation_f1": 0.25}) == ""


def config(*metrics: str, loss: str | None = None) -> TrainConfig:
    return TrainConfig(loss=loss, output=OutputConfig(metrics=tuple(map(metric_name, metrics))))


@pytest.mark.parametrize(
    ("data", "flags", "expected"),
    [
        (
            dataset(LABELS, "classification", 7),
            config("rmse"),
            "--metrics rmse does not fit the targets of digits, which",
        ),
        (
            dataset(NUMBERS, "regression", 3),
            config("f1"),
            "--metrics f1 does not fit .* regression; name one of mae, rmse",
        ),
        (
            dataset(LABELS, "classification", 7),
            config("top-8"),
            "--metrics top-8 needs 8 classes at least, digits has 7",
        ),
        (dataset(NUMBERS, "regression", 3), config("mae", loss="bce"), "--metrics mae does not fit --loss bce"),
        (dataset(LABELS, "classification", 9999), config("confusion-matrix"), "takes at most 2000 classes"),
        (dataset(LABELS, "classification", 7), config("a.py:f1", "f1"), "two metrics of one name"),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(data, flags, expected):
    with pytest.raises(UserError, match=expected):
        metrics_of(flags, data)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nothing", "needs update.* and compute.*, received nothing"),
        ("number", "needs update.* and compute.*, received int"),
        ("raises", r"received ValueError: bad in line \d+ of .*user_metric.py"),
        ("text", "returns <U1; return whole numbers or floats"),
        ("grows", "expected counts or sums that add up"),
        ("says", "compute.. of a metric returns str"),
        ("Mean", "expected counts or sums that add up"),
        ("Largest", "expected counts or sums that add up"),
        ("PerClass", "expected counts or sums that add up, of the same names each time"),
        ("Remembers", "received another value for the same counts after other calls of update"),
    ],
)
def test_a_wrong_metric_of_the_users_is_one_line(name, expected):
    with pytest.raises(UserError, match=expected):
        Job(1, "--epochs", 1, "--metrics", f"{METRIC}:{name}", "--global-batch-size", 20).train()


def test_an_odd_number_of_samples_has_parts_of_other_sizes():
    with pytest.raises(UserError, match="expected counts or sums that add up"):
        Metrics([f"{METRIC}:grows"], dataset(LABELS[:5], "classification", CLASSES), "loss")


def test_a_metric_that_cannot_be_tried_is_told(capsys):
    Metrics([f"{METRIC}:raises"], dataset(LABELS, "classification", CLASSES), "loss")
    assert re.search(
        r"raises is not tried on the parts of a batch: .* ValueError: bad in line", capsys.readouterr().err
    )


def test_a_metric_may_change_what_it_is_given_and_return_a_list_of_counts(tmp_path):
    plain, spoilt = (
        train(2, tmp_path / name, "--epochs", 1, "--metrics", *names, "accuracy", "--best-by", "loss")
        for name, names in {"plain": (), "spoilt": (f"{METRIC}:Spoils", f"{METRIC}:Listed", "confusion-matrix")}.items()
    )
    assert of("epoch", spoilt, "validation_accuracy") == of("epoch", plain, "validation_accuracy")
    [[_, num_zeros]], [matrix] = (of("epoch", spoilt, f"validation_{name}") for name in ("Listed", "confusion_matrix"))
    assert num_zeros == sum(matrix[0]) > 0


def test_counts_of_other_names_on_other_ranks_are_refused():
    group = Group(2)

    def one(rank: int) -> None:
        found = Metrics([], dataset(LABELS, "classification", CLASSES), "loss")
        found.metrics = (Metric("own", "own", lambda outputs, targets: {f"class {targets[0]}": 1}, sum),)
        found.has_user_metric = True
        tally = Tally(found, 1)
        tally.add(0, LOGITS, np.full(100, rank))
        tally.totals(ThreadCollectives(group, rank, 2))

    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(one, rank) for rank in range(2)]:
            with pytest.raises(UserError, match="of other names, types or shapes on other ranks"):
                result.result()


def test_the_metrics_of_weights_with_ema_are_reported(tmp_path):
    found = train(2, tmp_path, "--epochs", 1, "--ema", 0.9, "--metrics", "f1")
    assert {"validation_f1", "ema_validation_f1"} <= found[-2].keys()
    assert dataclasses.is_dataclass(OutputConfig)
