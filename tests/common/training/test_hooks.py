"""Hooks and other parts of a session, on real ranks."""

from __future__ import annotations

import re

import pytest
from ranks import REPOSITORY, full, launch

PROGRAM = """
import dataclasses
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.common.reporting import Reporter
from allstep.common.training.start import start
from allstep.{framework} import train

class Recorder(Hook):
    def __init__(self):
        self.seen = []
    def on_start(self, session):
        assert session.strategy and session.worker.framework == "{framework}" and len(session.dataset.train) == 64
        self.seen.append(f"start {{session.progress.step}}")
    def on_step(self, session):
        self.seen.append(f"step {{session.progress.step}}")
    def on_epoch(self, session):
        self.seen.append(f"epoch {{session.progress.position.epoch}}")
    def on_save(self, session):
        self.seen.append(f"save {{session.progress.step}}")
    def on_end(self, session):
        (session.config.output.output_dir / f"seen-{{session.placement.rank}}").write_text(", ".join(self.seen))

class Silent(Reporter):
    def event(self, name, **fields):
        pass

def main():
    session = train.session(*start(train.strategies), [Recorder()])
    dataclasses.replace(session, open_reporter=lambda *_: Silent()).train()
run_rank(main)
"""
FLAGS = ("--dataset", "synthetic", "--synthetic-samples", 64, "--global-batch-size", 32, "--checkpoint-every", 1)


@pytest.mark.parametrize("framework", ["pytorch", full("tensorflow")])
def test_hooks_see_the_session_at_every_moment(framework, tmp_path):
    """Oracle: a run of two epochs of two steps, saved after each step, and a resumed run of one more epoch."""
    script = tmp_path / "hooked.py"
    script.write_text(PROGRAM.format(framework=framework))
    first = "start 0, step 1, save 1, step 2, save 2, epoch 1, step 3, save 3, step 4, save 4, epoch 2"
    for launcher, num_ranks, flags, seen in (
        ("horovodrun-gloo", 2, ("--epochs", 2), first),
        ("alone", 1, ("--epochs", 3, "--resume", "latest"), "start 4, step 5, save 5, step 6, save 6, epoch 3"),
    ):
        result = launch(launcher, num_ranks, script, *FLAGS, *flags, "--output-dir", tmp_path / "run")
        assert result.returncode == 0 and "Epoch =" not in result.output, result.output
        for rank in range(num_ranks):
            assert (tmp_path / "run" / f"seen-{rank}").read_text() == seen


def test_the_program_on_the_page(tmp_path):
    script = tmp_path / "page.py"
    page = (REPOSITORY / "docs" / "five-steps.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    script.write_text(program)
    result = launch("horovodrun-gloo", 2, script, *FLAGS, "--epochs", 2, "--output-dir", tmp_path / "run")
    assert result.returncode == 0 and re.findall(r"epoch .*", result.output) == [
        "epoch 1 ended at step 2",
        "epoch 2 ended at step 4",
    ], result.output
