"""Changes of gradients and weights are the same on any number of ranks, in both frameworks, and after a resume.

Oracle: a run of one rank in PyTorch; for the effect of a change, a run without it; for a resume, the uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import events, full, last, train

from allstep.commands.parity import curves
from allstep.common.checkpoint import load

FLAGS = ("--model", "mlp", "--global-batch-size", 128, "--log-every", 1, "--checkpoint-every", 6, "--base-lr", 0.05)
CHANGES = ("--clip-norm", 0.5, "--gradient-noise", 0.001, "--label-smoothing", 0.1, "--ema", 0.9)
CHANGES += ("--class-weights", "balanced", "--sampler", "balanced")

OPTIMIZERS = {
    "lars": ("--optimizer", "lars", "--base-lr", 5, "--weight-decay", 0.01),
    "lamb": ("--optimizer", "lamb", "--base-lr", 0.02, "--weight-decay", 0.01),
    "novograd": ("--optimizer", "novograd", "--base-lr", 0.01, "--weight-decay", 0.01, "--grad-averaging"),
    "muon": ("--optimizer", "muon", "--base-lr", 0.005, "--weight-decay", 0.01),
    "adagrad": ("--optimizer", "adagrad", "--base-lr", 0.02, "--weight-decay", 0.01),
    "rmsprop": ("--optimizer", "rmsprop", "--base-lr", 0.002, "--weight-decay", 0.01),
}
PLACES = {
    "TensorFlow": ("tensorflow", "alone", 1),
    "Horovod in PyTorch": ("pytorch", "horovodrun-mpi", 2),
    "Horovod in TensorFlow": ("tensorflow", "horovodrun-mpi", 2),
    "DDP": ("pytorch", "alone", 1, "--strategy", "ddp", "--num-gpus", 2),
    "FSDP": ("pytorch", "alone", 1, "--strategy", "fsdp", "--num-gpus", 2),
    "model parallel": ("pytorch", "alone", 1, "--strategy", "model-parallel", "--stages", 2),
    "mirrored": ("tensorflow", "alone", 1, "--strategy", "mirrored", "--num-devices", 2),
    "central storage": ("tensorflow", "alone", 1, "--strategy", "central-storage", "--num-devices", 2),
    "multi-worker mirrored": ("tensorflow", "horovodrun-mpi", 2, "--strategy", "multi-worker-mirrored"),
}


def train_at(placement: tuple, output_dir: Path, *flags) -> list[dict]:
    framework, launcher, num_ranks, *own = placement
    return train(framework, launcher, num_ranks, output_dir, *FLAGS, *own, *flags)


def losses(reported: list[dict]) -> list[float]:
    return [event["loss"] for event in reported if event["event"] == "step"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that trains two epochs on one rank in PyTorch, once per flags, and gives the directory."""
    made: dict[tuple, Path] = {}

    def make(*flags) -> Path:
        if flags not in made:
            made[flags] = tmp_path_factory.mktemp("alone")
            train_at(("pytorch", "alone", 1), made[flags], "--epochs", 2, "--keep-checkpoints", 100, *flags)
        return made[flags]

    return make


def test_each_change_changes_something(alone):
    """The first loss is that of the initial weights, so only smoothing changes it."""
    plain = losses(events(alone()))
    clipped, noisy, smooth = (losses(events(alone(*CHANGES[i : i + 2]))) for i in (0, 2, 4))
    assert clipped[0] == noisy[0] == plain[0] != smooth[0]
    assert clipped[1] != plain[1] and noisy[1] != plain[1]
    assert losses(events(alone("--ema", 0.9))) == plain


EVERYWHERE = [
    *("Horovod in PyTorch", "Horovod in TensorFlow", "FSDP", "model parallel", "mirrored"),
    *(full("TensorFlow"), full("DDP"), full("central storage"), full("multi-worker mirrored")),
]


@pytest.mark.parametrize("placement", EVERYWHERE)
def test_changes_are_the_same_everywhere(placement, alone, tmp_path):
    expected, received = events(alone(*CHANGES)), train_at(PLACES[placement], tmp_path, "--epochs", 2, *CHANGES)
    assert losses(received) == pytest.approx(losses(expected), rel=1e-4)
    for name in ("validation_loss", "ema_validation_loss"):
        assert last(received, "epoch")[name] == pytest.approx(last(expected, "epoch")[name], rel=1e-4)
    assert_averages_alike(alone(*CHANGES), tmp_path)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_averages_are_those_of_the_weights(framework, tmp_path):
    """Oracle: the recursion over the weights of all steps, in float64."""
    flags = ("--epochs", 1, "--ema", 0.9, "--checkpoint-every", 1, "--keep-checkpoints", 100)
    train_at((framework, "alone", 1), tmp_path, *flags)
    average: dict[str, np.ndarray] = {}
    for path in sorted((tmp_path / "checkpoints").iterdir()):
        arrays = load(path, path.parent, warn=print).arrays
        for name in (name.removeprefix("ema/") for name in arrays if name.startswith("ema/")):
            weight = arrays[f"model/{name}"].astype(np.float64)
            average[name] = 0.9 * average[name] + 0.1 * weight if name in average else weight
            np.testing.assert_allclose(arrays[f"ema/{name}"], average[name], rtol=1e-5, atol=1e-7)
    assert len(average) == 6


def assert_averages_alike(expected: Path, received: Path) -> None:
    of_each = [
        {
            name: array
            for name, array in load("latest", path / "checkpoints", warn=print).arrays.items()
            if "ema/" in name
        }
        for path in (expected, received)
    ]
    assert of_each[0]
    assert curves.weights_apart(*of_each) <= 1e-3


@pytest.mark.parametrize(
    ("optimizer", "placement"),
    [
        *(("lamb", "FSDP"), ("novograd", "mirrored"), ("lars", "Horovod in PyTorch")),
        ("muon", "FSDP"),
        *(full("muon", "mirrored"), full("muon", "Horovod in TensorFlow"), full("muon", "model parallel")),
        full("adagrad", "model parallel"),
        *(full("lars", "FSDP"), full("novograd", "FSDP"), full("adagrad", "FSDP")),
        *(full("novograd", "model parallel"), full("lamb", "model parallel"), full("lamb", "Horovod in PyTorch")),
        *(full("novograd", "central storage"), full("lars", "multi-worker mirrored"), full("lamb", "mirrored")),
    ],
)
def test_optimizers_are_the_same_everywhere(optimizer, placement, alone, tmp_path):
    flags = OPTIMIZERS[optimizer]
    expected, received = events(alone(*flags)), train_at(PLACES[placement], tmp_path, "--epochs", 2, *flags)
    assert losses(received) == pytest.approx(losses(expected), rel=1e-3)


# The slots of the others are of the same kinds: one number per weight, or one per layer as in NovoGrad.
ONE_OF_EACH_KIND = [name if name in ("lamb", "novograd", "muon") else full(name) for name in OPTIMIZERS]


@pytest.mark.parametrize("optimizer", ONE_OF_EACH_KIND)
def test_goes_on_in_the_other_framework(optimizer, alone, tmp_path):
    """Resume in mid-epoch, with PyTorch's slots in TensorFlow and TensorFlow's in PyTorch."""
    flags, source = (*OPTIMIZERS[optimizer], "--ema", 0.9), alone(*OPTIMIZERS[optimizer], "--ema", 0.9)
    there, back = tmp_path / "there", tmp_path / "back"
    middle = source / "checkpoints" / "step-00000006"
    train_at(PLACES["TensorFlow"], there, "--epochs", 2, "--resume", middle, "--keep-checkpoints", 100, *flags)
    late = there / "checkpoints" / "step-00000018"
    train_at(("pytorch", "alone", 1), back, "--epochs", 2, "--resume", late, *flags)
    expected = last(events(source), "epoch")
    for directory in (there, back):
        received = last(events(directory), "epoch")
        for name in ("validation_loss", "ema_validation_loss"):
            assert received[name] == pytest.approx(expected[name], rel=1e-3)
        assert_averages_alike(source, directory)


@pytest.mark.parametrize("optimizer", ONE_OF_EACH_KIND)
def test_a_resumed_run_ends_exactly_as_if_it_had_not_stopped(optimizer, alone, tmp_path):
    flags = (*OPTIMIZERS[optimizer], *CHANGES)
    source = alone(*flags)
    middle = source / "checkpoints" / "step-00000006"
    train_at(("pytorch", "alone", 1), tmp_path, "--epochs", 2, "--resume", middle, *flags)
    one, other = (load("latest", path / "checkpoints", warn=print).arrays for path in (source, tmp_path))
    assert one.keys() == other.keys()
    assert all(np.array_equal(array, other[name]) for name, array in one.items())
