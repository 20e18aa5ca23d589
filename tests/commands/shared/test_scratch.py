"""Temporary folders of commands: what a killed process left goes at the next start, and nothing else does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from allstep.commands.shared import jobs

HOLD = """
from allstep.commands.shared.jobs import scratch_folder
with scratch_folder("try") as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs.tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_process_is_cleaned_up_after(temporary):
    elsewhere = temporary / "elsewhere"
    for folder in (elsewhere, temporary / "allstep-try-abcdefgh", temporary / "allstep-other-abcdefgh"):
        folder.mkdir()
        (folder / "precious").touch()
    (elsewhere / ".process").touch()
    (temporary / "allstep-try-12345678").symlink_to(elsewhere)
    before = set(temporary.iterdir())
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], **pipes) as process:
        held = process.stdout.readline().strip()
        with jobs.scratch_folder("try") as own:
            assert set(map(str, set(temporary.iterdir()) - before)) == {held, str(own)}  # the other one is alive
            (own / "content").touch()
        process.kill()
    assert {str(path) for path in set(temporary.iterdir()) - before} == {held}
    with jobs.scratch_folder("other"):
        pass
    with jobs.scratch_folder("try") as own:
        assert set(temporary.iterdir()) - before == {own}
    assert set(temporary.iterdir()) == before and (elsewhere / "precious").exists()
