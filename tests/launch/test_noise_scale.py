"""Gradient noise scale of real runs, and the batch size that follows it.

Oracle: a run of one rank in passes, whose parts `tests/pytorch/test_noise_scale.py` checks; for a resume, the
uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import events, full, last, train

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.launch import placement as placements
from allstep.pytorch import strategies as pytorch_strategies
from allstep.tensorflow import strategies as tensorflow_strategies

FLAGS = ("--model", "mlp", "--global-batch-size", 40, "--base-lr", 0.02, "--epochs", 4, "--batch-ramp", "auto",
         "--checkpoint-every", 20, "--keep-checkpoints", 100)  # fmt: skip
ALONE = ("pytorch", "alone", 1, "--accumulate-steps", 2)
PLACES = {
    "Horovod in PyTorch": ("pytorch", "horovodrun-mpi", 2),
    "DDP": ("pytorch", "alone", 1, "--strategy", "ddp", "--num-gpus", 2),
    "Horovod in TensorFlow": ("tensorflow", "horovodrun-mpi", 2),
    "mirrored": ("tensorflow", "alone", 1, "--strategy", "mirrored", "--num-devices", 2),
    "multi-worker mirrored": ("tensorflow", "horovodrun-mpi", 2, "--strategy", "multi-worker-mirrored"),
}


def train_at(placement: tuple, output_dir: Path, *flags) -> list[dict]:
    framework, launcher, num_ranks, *own = placement
    return train(framework, launcher, num_ranks, output_dir, *own, *FLAGS, *flags)


def scales(found: list[dict]) -> list[float]:
    return [event["gradient_noise_scale"] for event in found if event["event"] == "epoch"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("alone")
    train_at(ALONE, output_dir)
    return output_dir


@pytest.mark.parametrize(
    "placement",
    ["Horovod in PyTorch", "Horovod in TensorFlow", *map(full, ("DDP", "mirrored", "multi-worker mirrored"))],
)
def test_ranks_and_devices_measure_the_same(placement, alone, tmp_path):
    found = train_at(PLACES[placement], tmp_path)
    assert scales(found) == pytest.approx(scales(events(alone)), rel=1e-3)
    assert last(found, "epoch")["validation_loss"] == pytest.approx(
        last(events(alone), "epoch")["validation_loss"], rel=1e-3
    )


@pytest.mark.parametrize(
    ("strategies", "flags", "told"),
    [
        (pytorch_strategies, ("auto", "5:2"), "expected --batch-ramp to be auto or EPOCH:FACTOR, received auto"),
        (pytorch_strategies, ("auto", "--strategy", "fsdp"), "received --strategy fsdp"),
        (tensorflow_strategies, ("auto", "--precision", "fp16"), "received --precision fp16"),
    ],
    ids=["mixed", "fsdp", "fp16"],
)
def test_refuses_to_follow_what_is_not_measured(strategies, flags, told):
    one = placements.ALONE
    with pytest.raises(UserError, match=told) as error:
        strategies.check(parse(strategies.STRATEGIES, one, ["--batch-ramp", *flags]), one)
    assert "\n" not in str(error.value)
