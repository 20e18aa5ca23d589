"""Training in one framework starts from weights of the other. Oracle: the checksum of the weights.

A learning rate of 1e-60, which is 0 in float32, changes no weight, so such a run ends with its initial weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import forward
import numpy as np
import pytest
import torch
import torchvision
from ranks import last, launch, train
from safetensors.torch import save_file

from allstep.common.checkpoint import load
from allstep.common.checkpoint.weights_file import read_weights
from allstep.common.recipe.weights import checksum, initial_weights
from allstep.pytorch import Session

# Images are not square and have three channels, so that exchanged axes are detected.
IMAGE_SHAPE, NUM_CLASSES = (9, 7, 3), 5
DATA = ("--dataset", "synthetic", "--synthetic-samples", 200, "--synthetic-shape", *IMAGE_SHAPE,
        "--synthetic-classes", NUM_CLASSES)  # fmt: skip
STANDING_STILL = ("--base-lr", "1e-60", "--momentum", 0, "--epochs", 1)
OTHER = {"pytorch": "tensorflow", "tensorflow": "pytorch"}


@pytest.mark.parametrize("framework", OTHER)
def test_the_other_framework_goes_on_from_the_weights(framework, tmp_path):
    trained = train(framework, "alone", 1, tmp_path / "a", *DATA, "--epochs", 2, "--base-lr", 0.05)
    flags = (*DATA, *STANDING_STILL, "--init-from", tmp_path / "a")
    num_ranks = 2 if framework == "pytorch" else 1
    launcher = "horovodrun-mpi" if num_ranks == 2 else "alone"
    started = train(OTHER[framework], launcher, num_ranks, tmp_path / "b", *flags)
    assert last(started, "end")["weights_checksum"] == last(trained, "end")["weights_checksum"]
    assert last(started, "end")["weights_checksum"] != checksum(initial())
    received, expected = last(started, "epoch"), last(trained, "epoch")
    assert received["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)
    assert received["validation_accuracy"] == expected["validation_accuracy"]


def initial() -> dict:
    return initial_weights(forward.shapes("cnn", IMAGE_SHAPE, NUM_CLASSES), seed=0)


@pytest.mark.parametrize("framework", OTHER)
def test_both_start_from_the_same_weights(framework, tmp_path):
    end = last(train(framework, "alone", 1, tmp_path, *DATA, *STANDING_STILL), "end")
    assert end["weights_checksum"] == checksum(initial())


def test_a_checkpoint_of_another_model_names_the_first_mismatch(tmp_path):
    train("pytorch", "alone", 1, tmp_path, *DATA, "--epochs", 1)
    refused(tmp_path, "--model", "mlp", expected="expected model/fc1.weight (128, 189), received (128, 128)")
    refused(tmp_path / "nowhere", expected="none is there")


@pytest.mark.parametrize("framework", OTHER)
def test_both_start_from_torchvisions_weights(framework, tmp_path):
    model = torchvision.models.resnet18(num_classes=NUM_CLASSES)
    save_file(model.state_dict(), tmp_path / "resnet18.safetensors", metadata={"format": "pt"})
    flags = ("--model", "resnet18", *STANDING_STILL, "--init-from", tmp_path / "resnet18.safetensors")
    train(framework, "alone", 1, tmp_path / "run", *DATA, *flags)
    weights = {name: array.numpy() for name, array in model.state_dict().items() if array.dim()}
    # Batch norm's statistics change with any learning rate.
    trained = load(tmp_path / "run", tmp_path, warn=print).arrays
    for name, array in weights.items():
        assert "running" in name or np.array_equal(trained[f"model/{name}"], array), name


def test_weights_that_do_not_fit_or_are_none(tmp_path):
    save_file(torchvision.models.resnet18(num_classes=3).state_dict(), tmp_path / "three.safetensors")
    (tmp_path / "text.safetensors").write_text("These are not the weights that you are looking for.")
    flags = ("--model", "resnet18")
    refused(tmp_path / "three.safetensors", *flags, expected="expected model/fc.weight (5, 512), received (3, 512)")
    refused(tmp_path / "text.safetensors", *flags, expected="text.safetensors: expected")
    refused(tmp_path / "none.safetensors", *flags, expected="No such file or directory")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_keep_their_values(dtype, tmp_path):
    values = torch.tensor([1.0, -0.1, 3e4, 1e-6, 0.0]).to(dtype)
    save_file({'a "BF16"': values, "dtype": torch.arange(3)}, tmp_path / "half.safetensors")
    found = read_weights(tmp_path / "half.safetensors")
    assert found['a "BF16"'].dtype == np.float32 and found["dtype"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found['a "BF16"'], values.float().numpy())


def refused(source: Path, *flags: str, expected: str) -> None:
    result = launch("alone", 1, "pytorch/train.py", *map(str, DATA), *flags, "--init-from", source)
    assert (result.returncode, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    assert line.startswith("allstep: error: ") and expected in line


@pytest.mark.parametrize("has_counts", [True, False])
def test_a_file_of_weights_may_lack_counts_of_batch_norms(has_counts, tmp_path):
    """Batch norms without momentum average over all batches that they have counted."""
    inputs, labels = torch.randn(24, 6), torch.arange(24) % 3
    (found, _), (wanted, norm) = (normed() for _ in range(2))
    wanted(torch.randn(4, 6))
    if not has_counts:
        cast(torch.Tensor, norm.num_batches_tracked).zero_()
    state = {name: one for name, one in wanted.state_dict().items() if has_counts or "num_batches" not in name}
    save_file(state, path := tmp_path / "weights.safetensors")
    flags = {"global_batch_size": 24, "base_lr": 1e-9, "momentum": 0.0, "weight_decay": 0.0, "epochs": 1}
    Session(found, (inputs, labels), (inputs[:2], labels[:2]), init_from=str(path), **flags).fit()
    wanted(inputs)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict())


def normed() -> tuple[torch.nn.Sequential, torch.nn.Module]:
    norm = torch.nn.BatchNorm1d(5, momentum=None)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), norm, torch.nn.Linear(5, 3)), norm
