"""Weights of classes, and orders in which classes come equally often. Oracles: scikit-learn, and counts of samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy_ranks import Job, of, train
from sklearn.utils.class_weight import compute_class_weight

from allstep.common.base.errors import UserError
from allstep.common.catalog.losses import check_loss
from allstep.common.config.train_config import OptimizerConfig, TrainConfig
from allstep.common.data.classes import BalancedOrder, class_weights_of, labels_of, tell_alike
from allstep.common.data.datasets.base import ArraySplit, Dataset, Subset

# Class 2 has no samples.
SIZES = (300, 11, 0, 57, 2)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), SIZES))


def dataset(labels: np.ndarray, **changes) -> Dataset:
    split = ArraySplit(np.zeros((len(labels), 2), np.float32), labels)
    return dataclasses.replace(Dataset(split, split, (2,), int(labels.max()) + 1), **changes)


@pytest.mark.parametrize("epoch", range(3))
def test_all_classes_come_equally_often_and_so_do_the_samples_of_each(epoch):
    found = BalancedOrder.of(LABELS).order(np.arange(len(LABELS)), seed=3, epoch=epoch)
    times = np.bincount(LABELS[found], minlength=5)
    assert times[2] == 0 and np.ptp(np.delete(times, 2)) <= 1 and times.sum() == len(LABELS)
    per_sample = np.bincount(found, minlength=len(LABELS))
    assert all(np.ptp(per_sample[one == LABELS]) <= 1 for one in (0, 1, 3, 4))


def test_the_order_depends_on_seed_and_epoch_alone():
    order, positions = BalancedOrder.of(LABELS), np.arange(len(LABELS))
    whole = order.order(positions, seed=3, epoch=1)
    np.testing.assert_array_equal(order.order(positions[::-7], seed=3, epoch=1), whole[::-7])
    for seed, epoch in ((4, 1), (3, 2)):
        assert (order.order(positions, seed=seed, epoch=epoch) != whole).mean() > 0.5
    # A large class shows other samples in the next epoch.
    large = [set(order.order(positions, seed=3, epoch=epoch)) & set(np.flatnonzero(LABELS == 0)) for epoch in (1, 2)]
    assert large[0] != large[1]
    # Not one class after another.
    assert len(np.unique(LABELS[whole][:16])) == 4


def test_balanced_weights_are_those_of_scikit_learn(tmp_path):
    labels = LABELS[LABELS != 2] - (LABELS[LABELS != 2] > 2)
    expected = compute_class_weight("balanced", classes=np.arange(4), y=labels)
    assert class_weights_of("balanced", dataset(labels)) == pytest.approx(tuple(expected))
    np.save(tmp_path / "w.npy", expected)
    (tmp_path / "w.txt").write_text(" ".join(map(str, expected)))
    for name in ("w.npy", "w.txt"):
        assert class_weights_of(str(tmp_path / name), dataset(labels)) == tuple(expected)
    assert class_weights_of(None, dataset(labels)) == ()


class Computed:
    """Split that knows its labels only by reading them."""

    parallel = False

    def __len__(self) -> int:
        return 10_000

    def read(self, indices, *, epoch):
        return np.zeros((len(indices), 1)), indices % 7


def test_labels_of_any_split():
    chosen = np.array([5, 3, 9999])
    np.testing.assert_array_equal(labels_of(Computed()), np.arange(10_000) % 7)
    np.testing.assert_array_equal(labels_of(Subset(Computed(), chosen)), chosen % 7)
    np.testing.assert_array_equal(labels_of(Subset(dataset(LABELS).train, chosen[:2])), LABELS[chosen[:2]])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("1 2", "a weight for each of 5 classes, received 2; write them in the order of the classes"),
        ("1 2 -3 4 5", "weights of 0 or more, not all of them 0, received 5 numbers from -3 to 5"),
        ("0 0 0 0 0", "received 5 numbers from 0 to 0"),
        ("1 2 x", "could not convert"),
        ("nan 1 1 1 1", "of which 4 are finite"),
        ("", "received 0 numbers"),
    ],
)
def test_files_that_are_no_weights(content, expected, tmp_path):
    (tmp_path / "w").write_text(content)
    with pytest.raises(UserError, match=expected) as error:
        class_weights_of(str(tmp_path / "w"), dataset(LABELS))
    assert "\n" not in str(error.value)


def test_what_has_no_such_classes():
    with pytest.raises(UserError, match="balanced, received none of class c; name a file"):
        class_weights_of("balanced", dataset(LABELS, class_names=tuple("abcde")))
    for flag in ("--class-weights", "--sampler"):
        with pytest.raises(UserError, match=f"{flag}.* needs a data set of classes, received targets for next-token"):
            Job(1, "--dataset", "text", "--model", "text-decoder", flag, "balanced").build(0)


SKEWED = ("--synthetic-classes", 3, "--sampler", "balanced", "--class-weights", "balanced", "--epochs", 2)


@pytest.mark.parametrize("slices", [(), ("--slices", 5)], ids=["", "slices"])
def test_any_number_of_ranks_and_a_resume_train_alike(slices, tmp_path):
    runs = [train(ranks, tmp_path / str(ranks), *SKEWED, *slices) for ranks in (1, 3)]
    assert of("step", runs[1], "loss") == pytest.approx(of("step", runs[0], "loss"), rel=1e-5)
    train(2, tmp_path / "again", *SKEWED, "--epochs", 1, *slices)
    again = train(1, tmp_path / "again", *SKEWED, "--resume", "latest", *slices)
    assert of("step", again, "loss") == pytest.approx(of("step", runs[0], "loss"), rel=1e-5)
    with pytest.raises(UserError, match="expected --sampler balanced, with which the checkpoint was written"):
        train(1, tmp_path / "again", *SKEWED, "--resume", "latest", "--sampler", "shuffle")


def test_flags_that_do_not_go_together(tmp_path):
    (tmp_path / "w").write_text("1")
    with pytest.raises(UserError, match="--curriculum or --sampler balanced, received both"):
        Job(1, "--curriculum", tmp_path / "w", "--sampler", "balanced")
    with pytest.raises(UserError, match="--class-weights.*No such file"):
        Job(1, "--class-weights", tmp_path / "none")
    config = TrainConfig(optimizer=OptimizerConfig(class_weights="balanced"))
    with pytest.raises(UserError, match="--class-weights needs --loss cross-entropy, received mse"):
        check_loss(config, "regression")


@pytest.mark.parametrize(
    ("names", "told"),
    [(("\xe9", "a", "e\u0301"), r"'\xe9' and 'e\u0301'"), (("cat", "cat "), "'cat' and 'cat '"), (("a", "A"), None)],
)
def test_classes_that_look_alike_are_told(names, told, capfd):
    tell_alike(names)
    error = capfd.readouterr().err
    assert told in error if told else not error
