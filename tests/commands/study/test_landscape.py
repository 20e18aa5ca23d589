"""The loss around trained weights. Oracles: a forward pass of the MLP in NumPy, and the norms of filters."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from ranks import run, train
from safetensors.numpy import load_file

from allstep.commands.study.landscape import filter_normalised
from allstep.common.config.data_config import DataConfig
from allstep.common.data import datasets


def test_directions_have_the_norms_of_the_filters():
    weights = {"conv": np.arange(1.0, 37.0).reshape(2, 2, 3, 3), "bias": np.ones(2)}
    one, other = (filter_normalised(weights, seed=seed) for seed in (0, 1))
    for number in range(2):
        norms = [np.linalg.norm(array["conv"][number]) for array in (weights, one, other)]
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)
    assert not one["bias"].any() and np.abs(one["conv"] - other["conv"]).max() > 0.1


def loss(weights: dict[str, np.ndarray]) -> float:
    """Return the MLP's mean cross-entropy over the training samples of digits, in float64."""
    dataset = datasets.load(DataConfig())
    images, labels = dataset.train.read(np.arange(len(dataset.train)), epoch=0)
    x = ((images / 255 - np.array(dataset.mean)) / np.array(dataset.std)).reshape(len(images), -1)
    for layer in ("fc1", "fc2", "fc3"):
        x = x @ weights[f"{layer}.weight"].astype(float).T + weights[f"{layer}.bias"]
        x = x if layer == "fc3" else np.maximum(x, 0)
    x -= x.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(x).sum(axis=1)) - x[np.arange(len(x)), labels]))


def test_losses_are_those_at_the_moved_weights(tmp_path):
    train("pytorch", "alone", 1, tmp_path / "run", "--model", "mlp", "--epochs", 1, "--strategy", "single")
    program = (sys.executable, "-m", "allstep.commands.study.landscape")
    checkpoint = ("--config", tmp_path / "run/config.yaml", "--init-from", "latest")
    flags = ("--directions", "2", "--steps", "1", "--distance", "0.5", "--output", tmp_path / "landscape.jsonl")
    result = run(*program, *checkpoint, *flags)
    assert result.returncode == 0, result.output
    *rows, rise = map(json.loads, (tmp_path / "landscape.jsonl").read_text().splitlines())
    [file] = (tmp_path / "run/checkpoints").glob("*/model.safetensors")
    weights = load_file(file)
    canonical = {f"model/{name}": array for name, array in weights.items()}
    directions = [filter_normalised(canonical, seed=seed) for seed in range(2)]
    for row, distance in zip(rows, (-0.5, 0.0, 0.5), strict=True):
        moved = [
            {name: array + distance * direction[f"model/{name}"] for name, array in weights.items()}
            for direction in directions
        ]
        assert (row["distance"], row["loss"]) == pytest.approx((distance, np.mean(list(map(loss, moved)))), rel=1e-4)
    assert rise["mean_rise"] == pytest.approx(np.mean([row["loss"] for row in rows]) - rows[1]["loss"])
