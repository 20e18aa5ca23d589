"""Strategies of PyTorch in real launches. Oracle: a run of `single` with the same global batch."""

from __future__ import annotations

import dataclasses
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import (
    HOROVODRUN_GLOO,
    MPIRUN,
    RAISES,
    Job,
    assert_same_curve,
    assert_same_weights,
    broken,
)
from ranks import REPOSITORY, alive, environment, full, run
from ranks import events as read_events

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import MODELS
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE, find_placement
from allstep.pytorch.models import build_model
from allstep.pytorch.strategies import STRATEGIES, check, num_ranks_to_spawn

# 2 epochs of 26 steps. Slices are uneven, and the last batches of training and validation have a single sample.
FLAGS = ("--dataset", "synthetic", "--synthetic-samples", 226, "--synthetic-shape", 8, 8, 1, "--global-batch-size", 9,
         "--epochs", 2, "--log-every", 1)  # fmt: skip
TORCHRUN = ("torchrun", "--nproc-per-node")
ONE_DEVICE = "allstep: data-parallel runs on one device"
DDP, FSDP = ("--strategy", "ddp"), ("--strategy", "fsdp")


JOBS = {
    "horovod, 3 passes": Job(("horovod", "--accumulate-steps", 3), (*HOROVODRUN_GLOO, 2), resumes=True),
    "ddp": Job(("ddp", "--num-gpus", 2), resumes=True),
    "ddp under torchrun, 3 passes": Job(("ddp", "--accumulate-steps", 3), (*TORCHRUN, 2)),
    "ddp under horovodrun": Job(("ddp", "--no-gradient-as-bucket-view"), (*HOROVODRUN_GLOO, 2), resumes=True),
    "ddp under mpirun": Job(("ddp", "--no-static-graph"), (*MPIRUN, 3), resumes=True),
    "fsdp": Job(("fsdp", "--num-gpus", 3)),
    "fsdp, 2 passes": Job(("fsdp", "--num-gpus", 2, "--accumulate-steps", 2), resumes=True),
    "data-parallel": Job(("data-parallel", "--accumulate-steps", 2)),
    "model-parallel": Job(("model-parallel",)),
    "model-parallel, 3 stages": Job(("model-parallel", "--stages", 3, "--micro-batches", 3), (*MPIRUN, 3),
                                    resumes=True),
}  # fmt: skip


def train(output_dir: Path, *flags: str | int | Path, launcher: tuple[str | int, ...] = ()) -> list[dict]:
    started = (
        (*launcher, "pytorch/train.py") if "torchrun" in launcher else (*launcher, sys.executable, "pytorch/train.py")
    )
    result = run(*started, *flags, "--output-dir", output_dir)
    assert result.returncode == 0, result.output
    assert not re.search("Traceback|Warning|terminate|allstep: ", result.output.replace(ONE_DEVICE, "")), result.output
    return read_events(output_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, list[dict]]:
    output_dir = tmp_path_factory.mktemp("single")
    return output_dir, train(output_dir, *FLAGS, "--checkpoint-every", 20)


# These cases repeat code that other cases run.
REPEATED = ("ddp", "ddp under horovodrun", "ddp under mpirun", "fsdp", "model-parallel, 3 stages")


@pytest.mark.parametrize("name", [full(name) if name in REPEATED else name for name in JOBS])
def test_same_curve_as_single(name, reference, tmp_path):
    """Compare losses, weights and slots, from the start or from the middle of an epoch, there and at the end."""
    job, (expected_dir, expected) = JOBS[name], reference
    resumed = ("--resume", expected_dir / "checkpoints" / "step-00000040") if job.resumes else ()
    flags = ("--checkpoint-every", 20, "--strategy", *job.flags, *resumed)
    events = train(tmp_path, *FLAGS, *flags, launcher=job.launcher)
    assert_same_curve(events, expected, first_step=41 if job.resumes else 1)
    for step in (52,) if job.resumes else (40, 52):
        assert_same_weights(tmp_path, expected_dir, step)


@pytest.mark.parametrize("strategy", ["ddp", "horovod", "model-parallel"])
def test_what_each_rank_computes(strategy):
    """Test compression, operations, hooks, micro-batches and batch norm; the oracles are in the script."""
    result = run(*MPIRUN, 2, sys.executable, "tests/pytorch/ranks/strategies.py", strategy)
    assert result.returncode == 0, result.output
    assert result.stdout.count("all right") == 2


DRIFTS = "next(worker._network.parameters()).data.view(-1)[7] += 1e-6"
DIES = "if step == 7: import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def run_broken(what: str, tmp_path: Path, *flags: str):
    return run(sys.executable, broken("pytorch", what, tmp_path), *flags)


def test_a_drifted_rank_stops_the_job(tmp_path):
    result = run_broken(DRIFTS, tmp_path, *DDP, "--num-gpus", "2")
    assert result.returncode == 1, result.output
    assert result.output.count("out of step after step 1: the weights of rank 1 differ from those of rank 0") == 1


def test_a_rank_that_raises_is_named_once(tmp_path):
    result = run_broken(RAISES, tmp_path, *FSDP, "--num-gpus", "2")
    assert result.returncode == 1, result.output
    assert result.output.count(" stopped: ") == 1, result.output
    assert "rank 1 of 2" in result.output and "step 7 failed: OSError: lost the disk" in result.output


@pytest.mark.cold
def test_a_rank_that_is_killed_ends_the_job(tmp_path):
    result = run_broken(DIES, tmp_path, *DDP, "--num-gpus", "2")
    assert result.returncode == 128 + signal.SIGKILL, result.output


def test_a_mistake_of_the_ranks_is_told_once():
    result = run(sys.executable, "pytorch/train.py", *DDP, "--num-gpus", "2", "--base-lr", "1e6")
    assert result.returncode == 2, result.output
    assert result.output.count("allstep: error: expected a finite loss") == 1, result.output


@pytest.mark.cold
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), full(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_reach_the_ranks(number, status):
    command = [sys.executable, "pytorch/train.py", *DDP, "--num-gpus", "2", "--epochs", "10000"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout.readline().startswith("Epoch")
        ranks = [int(rank) for rank in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        job.send_signal(number)
        assert job.wait(60) == status
        deadline = time.monotonic() + 60
        while any(alive(rank) for rank in ranks):
            assert time.monotonic() < deadline, "a rank is left"
            time.sleep(0.05)
        stderr = job.stderr.read()
    assert len(ranks) == 2
    expected = {
        signal.SIGINT: r"allstep: rank 0 of 2 on \S+ stopped at step \d+: interrupted\n",
        signal.SIGTERM: r"allstep: rank 0 of 2 on \S+ stopped: SIGTERM after step \d+; nothing is saved without .*\n",
        signal.SIGKILL: "",  # SIGKILL also kills the ranks
    }
    assert re.fullmatch(expected[number], stderr), stderr


REFUSED = {
    "data-parallel under 2 ranks": ((*MPIRUN, 2), ("data-parallel",), "one process for --strategy data-parallel"),
    "stages and ranks differ": ((*MPIRUN, 2), ("model-parallel", "--stages", "3"), "--stages, 3, received 2"),
    "more devices than there are": ((), ("data-parallel", "--num-gpus", "99"), "--num-gpus to be at most"),
    "ranks by two means": ((*MPIRUN, 2), ("ddp", "--num-gpus", "2"), "--num-gpus without a launcher"),
    "adasum of 3": ((*MPIRUN, 3), ("horovod", "--op", "adasum"), "a power of two of ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    launcher, flags, expected = REFUSED[name]
    result = run(*launcher, sys.executable, "pytorch/train.py", "--strategy", *flags)
    assert result.returncode == 2, result.output
    assert result.output.count("allstep: error: ") == 1 and expected in result.output, result.output
    assert "Traceback" not in result.output


def test_horovod_under_torchrun_is_refused():
    """torchrun returns status 1 for a failed rank."""
    result = run(*TORCHRUN, 2, "pytorch/train.py", "--strategy", "horovod")
    assert result.returncode == 1
    assert result.output.count("allstep: error: ") == 1
    assert "received torchrun; start it by horovodrun -np 2, or give --strategy ddp" in result.output


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("ddp", "--compression", "fp16"), "--compression with --strategy horovod alone"),
        (("single", "--num-gpus", "2"), "--num-gpus with --strategy ddp or fsdp or data-parallel alone"),
        (("fsdp", "--comm-hook", "bf16"), "--comm-hook with --strategy ddp alone"),
        (("model-parallel", "--accumulate-steps", "2"), "--accumulate-steps with"),
        (("horovod", "--stages", "3"), "--stages with --strategy model-parallel alone"),
        (("ddp", "--communication", "ring"), "--communication with TensorFlow alone"),
    ],
)
def test_a_flag_of_another_strategy_is_refused(flags, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        check(parse(STRATEGIES, ALONE, ["--strategy", *flags]), ALONE)


@pytest.mark.parametrize("model", [name for name, entry in MODELS.items() if entry.max_stages > 1])
def test_most_stages(model):
    """Oracle: the number of layers with weights."""
    layers = build_model(model, (32, 32, 3), num_classes=10)
    assert MODELS[model].max_stages == sum(any(True for _ in layer.parameters()) for layer in layers)


def test_ranks_to_spawn():
    mpirun = dataclasses.replace(ALONE, launcher="mpirun", world_size=2)

    def number(*argv, placement=ALONE):
        return num_ranks_to_spawn(parse(STRATEGIES, placement, ["--strategy", *argv]), placement)

    assert [number("ddp"), number("ddp", "--num-gpus", "1"), number("ddp", "--num-gpus", "4")] == [0, 0, 4]
    assert [number("model-parallel"), number("model-parallel", "--stages", "1")] == [2, 0]
    assert [number("ddp", placement=mpirun), number("model-parallel", placement=mpirun), number("single")] == [0, 0, 0]


def test_a_spawned_rank_knows_its_place():
    placement = find_placement({"ALLSTEP_PORT": "1", "ALLSTEP_RANK": "1", "ALLSTEP_SIZE": "3", "ALLSTEP_LISTENER": "4"})
    assert (placement.launcher, placement.rank, placement.world_size, placement.local_rank, placement.local_size) == (
        "allstep",
        1,
        3,
        1,
        3,
    )


def test_list_strategies():
    result = run(sys.executable, "pytorch/train.py", "--list-strategies")
    assert result.returncode == 0, result.output
    listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert tuple(listed) == STRATEGIES
    assert set(listed.values()) == {"available"}


@pytest.mark.cold
def test_list_strategies_says_why_not():
    """Hide Horovod from Python."""
    hidden = "import sys; sys.modules['horovod.torch'] = None; from allstep.pytorch import train"
    result = run(sys.executable, "-c", f"{hidden}; train.main(['--list-strategies'])")
    assert "horovod         not available: Horovod is not installed" in result.stdout, result.output


def test_example_of_a_plain_loop():
    result = run(*MPIRUN, 2, sys.executable, "examples/pytorch_loop.py")
    assert result.returncode == 0, result.output
    [accuracy] = re.findall(r"validation accuracy: (\d\.\d+)", result.stdout)
    assert float(accuracy) >= 0.9
