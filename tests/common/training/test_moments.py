"""Hooks at the moments of a run, and requests to stop at them. Oracle: the moments' names, and the undisturbed run."""

from __future__ import annotations

import os
import re
import signal

import pytest
from numpy_ranks import Job, of, train
from numpy_worker import NumpyWorker
from ranks import events
from undisturbed_runs import SAVING, assert_ended_alike

from allstep.common.base.errors import Fault
from allstep.common.checkpoint import load
from allstep.common.reporting import Reporter
from allstep.common.training.hooks import Hook, StopTraining
from allstep.common.watch import watching


class Recorder(Hook):
    """Notes each moment; stops, asks to stop or fails at one of them, if told to."""

    def __init__(self, at: str = "", act=lambda: None) -> None:
        self.seen: list[str] = []
        self._at, self._act = at, act

    def _note(self, moment: str) -> None:
        self.seen.append(moment)
        if moment == self._at:
            self._act()

    def on_start(self, session):
        assert session.strategy and len(session.dataset.train) == 226 and isinstance(session.worker, NumpyWorker)
        self._note(f"start {session.progress.step}")

    def on_step(self, session):
        self._note(f"step {session.progress.step}")

    def on_epoch(self, session):
        self._note(f"epoch {session.progress.position.epoch}")

    def on_save(self, session):
        self._note(f"save {session.progress.step}")

    def on_end(self, session):
        self._note(f"end {session.progress.step}")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_see_the_run_at_every_moment(num_ranks, tmp_path):
    flags = ("--global-batch-size", 113, "--checkpoint-every", 1)
    for more, expected in (
        (
            ("--epochs", 2),
            "start 0, step 1, save 1, step 2, save 2, epoch 1, step 3, save 3, step 4, save 4, epoch 2, end 4",
        ),
        (("--epochs", 3, "--resume", "latest"), "start 4, step 5, save 5, step 6, save 6, epoch 3, end 6"),
    ):
        recorders = [Recorder() for _ in range(num_ranks)]
        train(num_ranks, tmp_path, *flags, *more, hooks=lambda job, rank: [recorders[rank]])  # noqa: B023
        assert [", ".join(recorder.seen) for recorder in recorders] == [expected] * num_ranks


def test_a_run_has_the_reporter_that_it_is_given(capsys):
    class Silent(Reporter):
        def event(self, name, **fields):
            heard.append(name)

    heard: list[str] = []

    def prepare(run):
        run.open_reporter = lambda config, rank, progress: Silent()
        return run

    Job(1, "--epochs", 1, prepare=prepare).train()
    assert heard == ["start", "epoch", "end"] and capsys.readouterr().out == ""


def stop() -> None:
    raise StopTraining


@pytest.mark.parametrize(
    ("moment", "saved"), [("start 0", []), ("step 3", ["save 3"]), ("save 4", []), ("epoch 1", [])]
)
def test_a_hook_ends_the_run(moment, saved, tmp_path):
    recorders = [Recorder(moment, stop) for _ in range(2)]
    found = train(2, tmp_path, "--epochs", 2, hooks=lambda job, rank: [recorders[rank]])
    step = int(moment.split()[1]) if moment != "epoch 1" else 4
    for recorder in recorders:
        assert recorder.seen[recorder.seen.index(moment) + 1 :] == [*saved, f"end {step}"]
    assert [event["event"] for event in found][-1] == "end"
    if step:
        assert load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step == step


def test_a_hook_that_fails_ends_the_job_with_the_step():
    def fail() -> None:
        raise OSError("lost the disk")

    with pytest.raises(Fault, match="^step 3 failed: OSError: lost the disk"):
        Job(2, hooks=lambda job, rank: [Recorder("step 3", fail if rank else lambda: None)]).train()


@pytest.mark.parametrize("moment", ["step 3", "step 4", "epoch 1", "save 4"])
def test_ranks_that_are_asked_to_stop_save_at_one_step_and_go_on_from_there(moment, undisturbed, tmp_path, capsys):
    """The moments are in mid-epoch, at its last step, after it, and after it is saved."""

    def hooks(job, rank):
        return [Recorder(moment, lambda: job.ask_to_stop("SIGTERM") if rank == 1 else None)]

    found = train(2, tmp_path, *SAVING, hooks=hooks)
    step = load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step
    assert len(of("step", found, "step")) == step and not of("end", found, "weights_checksum")
    words = rf"rank 0 of 2 on \S+ stopped after step {step} by SIGTERM; resumable: --resume latest goes on from here"
    assert len(re.findall(words, capsys.readouterr().err)) == 1
    train(2, tmp_path, *SAVING, "--resume", "latest")
    assert_ended_alike(tmp_path, undisturbed(2))


def test_a_run_that_is_asked_to_stop_and_has_nowhere_to_save_is_a_fault():
    def hooks(job, rank):
        return [Recorder("step 2", lambda: job.ask_to_stop("SIGUSR1"))]

    with pytest.raises(Fault, match="SIGUSR1 after step 2; nothing is saved without --output-dir"):
        Job(1, hooks=hooks).train()


@pytest.mark.parametrize("notice", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_the_run_and_it_goes_on_from_there(notice, undisturbed, tmp_path, capsys):
    """A real signal, by the watchdog's own threads."""

    def hooks(job, rank):
        return [Recorder("step 2", lambda: os.kill(os.getpid(), notice))]

    job = Job(1, "--output-dir", tmp_path, "--log-every", 1, "--base-lr", 0.05, "--epochs", 100_000, hooks=hooks)
    run = job.build(0)
    run.watching = watching
    run.train()
    step = load("latest", tmp_path / "checkpoints", warn=pytest.fail).progress.step
    assert step >= 2 and f"stopped after step {step} by {notice.name}" in capsys.readouterr().err
    assert len(of("step", events(tmp_path), "step")) == step
