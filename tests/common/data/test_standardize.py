"""Inputs scaled by their mean and deviation. Oracle: scikit-learn's StandardScaler on the training samples."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
import torch
from numpy_ranks import Group, Job, ThreadCollectives
from sklearn.preprocessing import StandardScaler

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import ArraySplit, Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position
from allstep.common.training.opening import standardized
from allstep.pytorch.inputs import Inputs as TorchInputs
from allstep.tensorflow.inputs import Inputs as TensorFlowInputs

DRAW = np.random.default_rng(0)
# A year, a share, a constant, money, and a number with a mean far larger than its deviation.
VALUES = np.stack(
    [
        DRAW.integers(1990, 2026, 9001),
        DRAW.random(9001),
        np.full(9001, 0.1),
        DRAW.lognormal(8, 3, 9001),
        1e6 + DRAW.normal(size=9001),
    ],
    axis=1,
).astype(np.float32)


def dataset(values: np.ndarray, **options) -> Dataset:
    split = ArraySplit(values, np.zeros(len(values), np.int64))
    return Dataset(split, split, values.shape[1:], 2, input_type=str(values.dtype), **options)


def over_ranks(data: Dataset, world_size: int) -> list[Dataset]:
    """Return what each of several ranks in threads finds."""
    group, found = Group(world_size), [data] * world_size

    def rank(number: int) -> None:
        found[number] = standardized(data, ThreadCollectives(group, number, world_size))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("num_samples", [1, 50, 9001])
def test_mean_and_deviation_are_those_of_scikit_learn(num_samples):
    found, scaler = standardized(dataset(VALUES[:num_samples]), OneRank()), StandardScaler().fit(VALUES[:num_samples])
    np.testing.assert_allclose(found.mean, scaler.mean_, rtol=1e-12)
    np.testing.assert_allclose(found.std, scaler.scale_, rtol=1e-7)
    for size in (2, 3, 70):
        assert {(one.mean, one.std) for one in over_ranks(dataset(VALUES[:num_samples]), size)} == {
            (found.mean, found.std)
        }


@pytest.mark.parametrize("kind", [np.float32, np.uint8])
@pytest.mark.parametrize("shape", [(5,), (3, 5)])
def test_networks_get_the_numbers_of_scikit_learn(kind, shape):
    values = VALUES if kind == np.float32 else DRAW.integers(0, 256, VALUES.shape).astype(np.uint8)
    values = values[:9000].reshape(-1, *shape)
    expected = StandardScaler().fit_transform(values.reshape(-1, 5).astype(float)).reshape(values.shape)
    data = standardized(dataset(values), OneRank())
    batch = Batch(values[:99], np.zeros(99, np.int64), 99, 99, 1.0, Position(0, 99))
    inputs, _ = TorchInputs(data, torch.device("cpu"), reports=False)(batch)
    np.testing.assert_allclose(inputs.numpy(), expected[:99], rtol=1e-5, atol=2e-2 if kind == np.float32 else 1e-5)
    np.testing.assert_allclose(inputs.numpy()[..., :3], expected[:99][..., :3], rtol=1e-5, atol=1e-5)
    theirs = TensorFlowInputs(data)(tf.constant(values[:99]))
    np.testing.assert_allclose(theirs.numpy(), inputs.numpy(), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_is_refused(tmp_path):
    with pytest.raises(UserError, match="--standardize needs inputs that are numbers, received images; leave it out"):
        Job(1, "--standardize").build(0)
    tokens = dataset(np.zeros((4, 3), np.int64))
    with pytest.raises(UserError, match="received tokens, which are integers; leave it out"):
        standardized(tokens, OneRank())


def test_only_the_training_part_counts_and_a_resume_needs_the_flag(tmp_path):
    labels = np.arange(200) % 3
    parts = {"x_train": VALUES[:200], "y_train": labels, "x_test": VALUES[:50] + 1, "y_test": labels[:50]}
    np.savez(tmp_path / "table.npz", **parts)
    flags = ("--dataset", f"npz:{tmp_path / 'table.npz'}", "--standardize", "--epochs", 1)
    run = Job(1, *flags).build(0)
    np.testing.assert_allclose(run.dataset.mean, StandardScaler().fit(VALUES[:200]).mean_, rtol=1e-12)
    Job(2, *flags, "--output-dir", tmp_path / "run", "--base-lr", "1e-6").train()
    with pytest.raises(UserError, match="expected --standardize True, with which the checkpoint was written"):
        Job(1, *flags[:2], "--output-dir", tmp_path / "run", "--resume", "latest").train()
