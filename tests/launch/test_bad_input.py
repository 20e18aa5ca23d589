"""Mistakes of users under real launchers. Oracle: one line on standard error, exit status 2, no traceback."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import RAISES, broken
from ranks import LAUNCHERS, launch

from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import check_launcher_of_horovod
from allstep.common.launch.placement import ALONE

# These are found before a framework is imported; `tests/mistakes` tries many more without a launcher.
MISTAKES = {"unknown flag": ("--epoch", "3"), "unwritable output": ("--output-dir", "/proc/allstep")}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_under_launchers(launcher, mistake):
    result = launch(launcher, 2, "pytorch/train.py", *MISTAKES[mistake])
    assert result.returncode == 2, result.output
    assert result.output.count("allstep: error:") == 1, result.output
    assert "Traceback" not in result.output


def test_a_mistake_is_told_to_ranks_that_come_late_to_the_watch(tmp_path):
    """Rank 0 finds the mistake as soon as ranks watch each other; other ranks must not report it as a death."""
    script = tmp_path / "late.py"
    script.write_text("""
import dataclasses, time
from allstep.commands.soak.fault_injection import Wrapped
from allstep.common.process.exit import run_rank
from allstep.common.training.start import start
from allstep.pytorch import train
class Late(Wrapped):
    def broadcast_arrays(self, arrays):
        received = self.original.broadcast_arrays(arrays)
        if "watch" in arrays:  # the address of rank 0
            time.sleep(self.rank)
        return received
def main():
    session = train.session(*start(train.strategies))
    worker = Wrapped(session.worker)
    worker.collectives = Late(worker.collectives)
    dataclasses.replace(session, worker=worker).train()
run_rank(main)
""")
    result = launch("horovodrun-gloo", 3, script, "--init-from", tmp_path / "nothing")
    assert result.returncode == 2, result.output
    assert result.output.count("allstep: error:") == 1 and "stopped at" not in result.output, result.output


def test_nan_names_step_and_learning_rate():
    result = launch("horovodrun-mpi", 2, "pytorch/train.py", "--base-lr", "1e6")
    assert result.returncode == 2
    assert result.output.count("allstep: error: expected a finite loss") == 1, result.output
    assert "at step " in result.output and "learning rate 1e+06" in result.output and "Traceback" not in result.output


def test_single_under_a_launcher_is_refused():
    result = launch("mpirun", 2, "pytorch/train.py", "--strategy", "single")
    assert result.returncode == 2
    assert result.output.count("allstep: error: expected one process") == 1


@pytest.mark.parametrize("name", ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"])
def test_launcher_and_horovod_disagree(name, monkeypatch):
    """mpirun starts ranks, but Horovod would use Gloo without a rendezvous, or end in SIGSEGV."""
    monkeypatch.setenv(name, "gloo")
    for launcher in (None, "horovodrun"):
        check_launcher_of_horovod(replace(ALONE, launcher=launcher))
    with pytest.raises(UserError, match=f"expected {name} to be mpi under mpirun, received gloo; unset it, or start"):
        check_launcher_of_horovod(replace(ALONE, launcher="mpirun"))


EARLY = """
from allstep.common.process.exit import run_rank
from allstep.common.training.start import start
from allstep.pytorch import train
def main():
    config, placement = start(train.strategies)
    if placement.rank == 1:
        raise RuntimeError("no licence on this host")
    train.session(config, placement).train()
run_rank(main)
"""


@pytest.mark.parametrize("launcher", ["horovodrun-mpi", "horovodrun-gloo"])
def test_one_rank_fails_before_the_others_reach_init(launcher, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    result = launch(launcher, 3, script, "--epochs", "1")
    assert result.returncode == 1, result.output
    assert result.output.count("rank 1 of 3") == 1 and result.output.count("stopped: RuntimeError: no licence") == 1


def test_one_rank_raises_in_a_step(tmp_path):
    script = broken("pytorch", RAISES, tmp_path)
    result = launch("horovodrun-gloo", 2, script)
    assert result.returncode == 1, result.output
    assert result.output.count(" stopped: ") == 1, result.output
    assert "rank 1 of 2" in result.output and "stopped: step 7 failed: OSError: lost the disk" in result.output
