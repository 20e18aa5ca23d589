"""SIGHUP, as from a terminal that closes: a checkpoint and a line, as by SIGTERM; under nohup, training goes on."""

from __future__ import annotations

import signal
import sys

import pytest
from ranks import LAUNCHERS, REPOSITORY, full

from allstep.commands.soak.training import training
from allstep.common.checkpoint import load

TRAINER = (sys.executable, str(REPOSITORY / "pytorch" / "train.py"), "--model", "mlp", "--log-every", "1")


@pytest.mark.parametrize("start", [(), ("horovodrun-gloo", 2), full(("spawned", 2))], ids=str)
def test_a_hangup_saves(start, tmp_path):
    launcher, num_ranks = start or ("", 1)
    words = (*LAUNCHERS[launcher], num_ranks, *TRAINER) if launcher in LAUNCHERS else TRAINER
    spawned = ("--strategy", "ddp", "--num-gpus", num_ranks) if launcher == "spawned" else ()
    command = [*words, "--checkpoint-every", 100000, "--epochs", 200, "--output-dir", tmp_path, *spawned]
    with training(list(map(str, command)), tmp_path, num_ranks) as job:
        job.wait_for_step(3)
        assert job.signal_launcher(signal.SIGHUP)
        status = job.process.wait(60)
        printed = job.printed()
    assert status == (128 + signal.SIGHUP if launcher == "horovodrun-gloo" else 0), printed
    notice = "SIGTERM" if launcher == "horovodrun-gloo" else "SIGHUP"  # horovodrun stops ranks by its own
    step = load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step
    assert f"stopped after step {step} by {notice}; resumable: --resume latest goes on from here" in printed


def test_under_nohup_training_goes_on(tmp_path):
    command = ["nohup", *TRAINER, "--epochs", "4", "--output-dir", str(tmp_path)]
    with training(command, tmp_path, 1) as job:
        job.wait_for_step(3)
        assert job.signal_launcher(signal.SIGHUP)
        assert job.process.wait(60) == 0 and job.reported_its_end(), job.printed()
