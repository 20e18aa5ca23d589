"""--precision fp16 with every strategy. Oracles: the published rule for the scale, float32, an uninterrupted run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import losses
from ranks import LAUNCHERS, events, full, last, run, train

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE
from allstep.pytorch import strategies as pytorch_strategies
from allstep.tensorflow import strategies as tensorflow_strategies

FRAMEWORKS = ["pytorch", "tensorflow"]
SCRIPT = Path(__file__).parent / "ranks" / "overflowing.py"
MPIRUN = LAUNCHERS["mpirun"]
SMALL = ("--dataset", "synthetic", "--synthetic-samples", 226, "--synthetic-shape", 8, 8, 1, "--global-batch-size", 9,
         "--log-every", 1)  # fmt: skip
# 64 samples: 8 steps.
TINY = ("--dataset", "synthetic", "--synthetic-samples", 64, "--synthetic-shape", 8, 8, 1, "--global-batch-size", 8,
        "--epochs", 1, "--log-every", 1)  # fmt: skip

JOBS = {
    "pytorch single": ((), 0),
    "pytorch horovod": ((*MPIRUN, 2), 1),
    "pytorch horovod --compression fp16 --accumulate-steps 2": ((*MPIRUN, 2), 1),
    "pytorch ddp": ((*MPIRUN, 2), 1),
    "pytorch fsdp": ((*MPIRUN, 2), 1),
    "pytorch data-parallel": ((), 0),
    "pytorch model-parallel": ((*MPIRUN, 2), 1),
    "tensorflow single": ((), 0),
    "tensorflow horovod": ((*MPIRUN, 2), 1),
    "tensorflow horovod --compression fp16": ((*MPIRUN, 2), 1),
    "tensorflow mirrored --num-devices 2 --accumulate-steps 2": ((), 0),
    "tensorflow central-storage --num-devices 2": ((), 0),
    "tensorflow multi-worker-mirrored": ((*MPIRUN, 2), 1),
    "tensorflow parameter-server": ((*MPIRUN, 2), 0),
}
"""Launcher of each job, and the rank whose gradients overflow."""


# These repeat code that other cases run.
REPEATED = ("single", "data-parallel", "ddp", "--compression", "central-storage", "multi-worker-mirrored")


@pytest.mark.parametrize("job", [full(job) if any(name in job for name in REPEATED) else job for job in JOBS])
def test_an_overflow_on_one_rank_skips_the_step_on_all(job, tmp_path):
    """Weights and slots do not change, which the script checks; the scale halves, and the step is counted."""
    launcher, rank = JOBS[job]
    framework, strategy, *flags = job.split()
    flags = ("--strategy", strategy, *flags, *TINY, "--output-dir", tmp_path)
    result = run(*launcher, sys.executable, SCRIPT, framework, rank, *flags)
    assert result.returncode == 0, result.output
    assert "all right on rank 0" in result.stdout, result.output
    found = events(tmp_path)
    scales = {event["step"]: event["loss_scale"] for event in found if event["event"] == "step"}
    # With a parameter server, later steps are in flight when the first overflow is detected.
    settled = {step: scale for step, scale in scales.items() if strategy != "parameter-server" or step > 5}
    assert settled == {step: 1024 if step <= 3 else 512 for step in settled}
    assert last(found, "epoch")["skipped_steps"] == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_trains_the_curve_of_float32_within_its_precision(framework, tmp_path):
    """Compare steps of 64 samples, none of which overflows. The difference was at most 1 %; 5 % are allowed."""
    flags = ("--model", "mlp", "--epochs", 1, "--log-every", 1, "--global-batch-size", 64)
    runs = [train(framework, "alone", 1, tmp_path / name, *flags, "--precision", name) for name in ("float32", "fp16")]
    assert last(runs[1], "epoch")["skipped_steps"] == 0
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=0.05)
    assert losses(runs[1]) != pytest.approx(losses(runs[0]), rel=1e-6)
    assert "loss_scale" not in str(runs[0]) and "skipped_steps" not in str(runs[0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resumed_run_goes_on_with_scale_and_count(framework, tmp_path):
    """Resume bit by bit, and in the other framework. Adam's bias correction must count only steps that were taken."""
    flags = (*SMALL, "--model", "mlp", "--epochs", 2, "--optimizer", "adam", "--base-lr", 0.001, "--precision", "fp16")
    whole = train(framework, "alone", 1, tmp_path / "1", *flags, "--checkpoint-every", 10, "--keep-checkpoints", 9)
    assert last(whole, "epoch")["skipped_steps"] > 0
    checkpoint = tmp_path / "1" / "checkpoints" / "step-00000020"
    resumed = train(framework, "alone", 1, tmp_path / "2", *flags, "--resume", checkpoint)
    assert last(resumed, "end")["weights_checksum"] == last(whole, "end")["weights_checksum"]
    steps = [[event for event in run if event["event"] == "step" and event["step"] > 20] for run in (whole, resumed)]
    assert steps[1] == steps[0]
    [other] = set(FRAMEWORKS) - {framework}
    crossed = train(other, "alone", 1, tmp_path / "3", *flags, "--resume", checkpoint)
    [first, *_] = [event for event in crossed if event["event"] == "step"]
    assert (first["step"], first["loss_scale"]) == (21, steps[0][0]["loss_scale"])
    assert first["loss"] == pytest.approx(steps[0][0]["loss"], rel=0.01)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    """A different scale of the gradients cannot fix it."""
    flags = ("--precision", "fp16", "--base-lr", "1e5", "--global-batch-size", "64")
    result = run(sys.executable, "pytorch/train.py", *flags, "--output-dir", tmp_path)
    assert result.returncode == 2, result.output
    assert "expected a finite loss" in result.output or "finite in half precision" in result.output, result.output


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("horovod", "--op", "adasum", "--precision", "fp16"), "another --precision for --op adasum, received fp16"),
        (("ddp", "--comm-hook", "powersgd", "--precision", "fp16"), "another --precision for --comm-hook powersgd"),
    ],
)
def test_refused(flags, expected):
    """These keep an overflow in their state, so all later steps would be wrong."""
    with pytest.raises(UserError, match=expected):
        pytorch_strategies.check(parse(pytorch_strategies.STRATEGIES, ALONE, ["--strategy", *flags]), ALONE)


def test_every_strategy_is_tried():
    for package, framework in ((pytorch_strategies, "pytorch"), (tensorflow_strategies, "tensorflow")):
        assert set(package.STRATEGIES) == {job.split()[1] for job in JOBS if job.startswith(framework)}
