"""Gradient noise scale of real runs, and the batch size that follows it.

Oracle: a run of one rank in passes, whose parts `tests/pytorch/test_noise_scale.py` checks; for a resume, the
uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import events, full, last, launch, train

from allstep.common.checkpoint import load

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


def test_the_batch_doubles_after_each_epoch_in_which_the_scale_exceeds_it(alone):
    factor, ramp = 1, []
    for epoch, scale in enumerate(scales(events(alone)), start=1):
        if scale > 40 * factor:
            factor *= 2
            ramp.append([epoch, factor])
    state = load("latest", alone / "checkpoints", warn=print)
    assert state.schedule["batch_ramp"] == ramp and ramp
    factors = [dict(map(tuple, ramp[:number])) for number in range(len(ramp) + 1)]
    sizes = [40 * max([1, *(f for e, f in factors[-1].items() if e <= epoch)]) for epoch in range(4)]
    assert state.progress.step == sum(-(-1437 // size) for size in sizes)


def test_resumed_in_mid_epoch_it_is_the_same(alone, tmp_path):
    train_at(ALONE, tmp_path, "--resume", alone / "checkpoints" / "step-00000060")
    assert scales(events(tmp_path))[-2:] == scales(events(alone))[-2:]
    one, other = (load("latest", path / "checkpoints", warn=print) for path in (alone, tmp_path))
    assert one.progress.running["noise_square"] == other.progress.running["noise_square"] != 0
    assert all(np.array_equal(array, other.arrays[name]) for name, array in one.arrays.items())


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
    ("framework", "flags", "told"),
    [
        ("pytorch", ("--batch-ramp", "auto"), "expected two ranks, devices or passes at least with --batch-ramp auto"),
        ("pytorch", ("--batch-ramp", "auto", "5:2"), "expected --batch-ramp to be auto or EPOCH:FACTOR, received auto"),
        ("pytorch", ("--batch-ramp", "auto", "--strategy", "fsdp"), "received --strategy fsdp"),
        ("tensorflow", ("--batch-ramp", "auto", "--precision", "fp16"), "received --precision fp16"),
    ],
    ids=str,
)
def test_refuses_to_follow_what_is_not_measured(framework, flags, told):
    result = launch("alone", 1, f"{framework}/train.py", *flags)
    assert result.returncode == 2, result.output
    [line] = result.stderr.splitlines()
    assert told in line
