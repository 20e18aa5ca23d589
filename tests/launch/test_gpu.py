"""Training on GPUs. Oracles: the same run on the CPU, in the other framework, and repeated."""

from __future__ import annotations

from pathlib import Path

import gpus
import pytest
from ranks import events, last, launch, run

from allstep.commands.parity import command as parity
from allstep.commands.parity.curves import Curve, apart, read_curve
from allstep.common.catalog.strategies import STRATEGIES

pytestmark = [pytest.mark.gpu, pytest.mark.cold]

FRAMEWORKS = ["pytorch", "tensorflow"]
NUM_STEPS = 50
CURVE = (*parity.DATA_FLAGS, *parity.SETTINGS["momentum"].flags, "--seed", parity.SEED, "--epochs", 2, "--log-every", 1)
SHORT = ("--model", "resnet18", "--epochs", 1, "--log-every", 1, "--global-batch-size", 64)


def train(framework: str, output_dir: Path, *flags: str | int | float, num_gpus: int = 1, ranks: int = 1) -> list[dict]:
    """Train on this many GPUs, with horovodrun for several ranks, and return the events."""
    visible = gpus.need(num_gpus)
    launcher = "alone" if ranks == 1 else "horovodrun-mpi"
    words = map(str, ("--output-dir", output_dir, *flags))
    result = launch(launcher, ranks, f"{framework}/train.py", *words, **visible)
    assert result.returncode == 0, result.output
    return events(output_dir)


def curve(framework: str, output_dir: Path, device: str) -> Curve:
    flags = (*CURVE, "--checkpoint-every", 10, "--keep-checkpoints", 100, "--deterministic", "--device", device)
    train(framework, output_dir, *flags)
    return read_curve(output_dir, NUM_STEPS)


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    """Return a function that gives the curve of a framework on a device, training each once."""
    known: dict[tuple[str, str], Curve] = {}

    def of(framework: str, device: str) -> Curve:
        if (framework, device) not in known:
            known[framework, device] = curve(framework, tmp_path_factory.mktemp("curve"), device)
        return known[framework, device]

    return of


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_float32_is_the_same_on_the_cpu_and_on_a_gpu(framework, curves):
    differences = apart(curves(framework, "cpu"), curves(framework, "cuda"))
    assert max(one.loss for one in differences.values()) <= 1e-5


def test_float32_is_the_same_in_both_frameworks_on_a_gpu(curves):
    differences = apart(curves("pytorch", "cuda"), curves("tensorflow", "cuda"))
    assert max(one.loss for one in differences.values()) <= 1e-5


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_equal_deterministic_runs_end_in_equal_bits(framework, precision, tmp_path):
    flags = (*SHORT, "--precision", precision, "--deterministic", "--device", "cuda")
    runs = [train(framework, tmp_path / number, *flags) for number in "12"]
    assert len({last(run, "end")["weights_checksum"] for run in runs}) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_precisions_learn(framework, tmp_path):
    accuracies = {
        precision: last(train(framework, tmp_path / precision, "--precision", precision, "--device", "cuda"), "epoch")
        for precision in ("tf32", "bf16", "fp16")
    }
    assert all(event["validation_accuracy"] >= 0.97 for event in accuracies.values()), accuracies


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_that_meet_one_gpu_train_on_the_cpu(framework, tmp_path):
    visible = gpus.need()
    result = launch("horovodrun-mpi", 2, f"{framework}/train.py", "--epochs", "1", "--output-dir", tmp_path, **visible)
    assert result.returncode == 0, result.output
    assert result.output.count("training on the CPU: 2 ranks of this host for 1 GPU") == 1, result.output
    assert last(events(tmp_path), "start")["device"] == "cpu"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cuda_insists(framework):
    visible = gpus.need()
    refused = launch("mpirun", 2, f"{framework}/train.py", "--device", "cuda", **visible)
    assert refused.returncode == 2 and "received 2 ranks for 1 GPU" in refused.output, refused.output


ONE_PROCESS = [(framework, name) for framework in FRAMEWORKS for name in STRATEGIES[framework]
               if STRATEGIES[framework][name].one_process]  # fmt: skip


@pytest.mark.parametrize(("framework", "strategy"), ONE_PROCESS)
def test_strategies_of_one_process_train_on_it(framework, strategy, tmp_path):
    found = train(framework, tmp_path, "--strategy", strategy, "--epochs", 1, "--precision", "fp16")
    assert last(found, "start")["device"] == "cuda"
    assert last(found, "epoch")["validation_accuracy"] > 0.8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_of_a_process_group_trains_on_it(strategy, tmp_path):
    visible = gpus.need()
    words = ("--strategy", strategy, "--epochs", "1", "--precision", "fp16", "--output-dir", tmp_path)
    result = run("torchrun", "--nproc-per-node", "1", "pytorch/train.py", *words, **visible)
    assert result.returncode == 0, result.output
    assert last(events(tmp_path), "start")["device"] == "cuda"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_gpus_train_as_one(framework, tmp_path):
    gpus.need(2)
    alone = train(framework, tmp_path / "1", *CURVE, "--deterministic", "--strategy", "single")
    both = train(framework, tmp_path / "2", *CURVE, "--deterministic", num_gpus=2, ranks=2)
    assert last(both, "start")["device"] == "cuda"
    losses = [[event["loss"] for event in run if event["event"] == "step"] for run in (alone, both)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
