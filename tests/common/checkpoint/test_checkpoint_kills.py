"""Kills at any moment, full disks and concurrent runs, with real processes (checkpoint_child.py).

ALLSTEP_KILLS=200 sets how often the writer is killed; the default suits a test run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from requirements import skip

from allstep.common.base.errors import UserError
from allstep.common.base.resources import host_name
from allstep.common.checkpoint import OutputDirectory, load
from allstep.common.reporting.base import write_whole

SCRIPT = str(Path(__file__).with_name("checkpoint_child.py"))
CHILD = [sys.executable, SCRIPT]
state_of = runpy.run_path(SCRIPT)["state_of"]


def refuse_warning(message: str) -> None:
    raise AssertionError(f"unexpected warning: {message}")


def latest_step(output: Path) -> int:
    """Return the step of the latest checkpoint, after checking it bit for bit against the state of that step."""
    state = load("latest", output / "checkpoints", warn=refuse_warning)
    step = state.progress.step
    expected = state_of(step, state.arrays["model/weight"].size).arrays
    assert state.arrays.keys() == expected.keys()
    assert all(state.arrays[name].tobytes() == array.tobytes() for name, array in expected.items())
    return step


def test_killed_at_random_moments(tmp_path):
    """Oracle: the state that follows from the loaded step, which is at least the last step that the child reported to
    be on the disk, and at most one more."""
    moments = random.Random(0)
    for _ in range(int(os.environ.get("ALLSTEP_KILLS", 15))):
        child = subprocess.Popen([*CHILD, "save_forever", tmp_path], stdout=subprocess.PIPE, text=True)
        first = child.stdout.readline()  # the child is past its imports
        time.sleep(moments.uniform(0, 0.1))
        child.kill()
        reported = [first, *child.communicate()[0].splitlines()]
        last = int(reported[-1])  # raises for a warning, which is not a number
        assert last <= latest_step(tmp_path) <= last + 1


def test_killed_before_every_touch_of_the_disk(tmp_path):
    """Every moment is tested: SIGKILL at each audit event (open, mkdir, rename, remove, ...).

    Oracle: the step that is left is 1, from some event on 2, and never anything else or with a warning.
    """
    result = subprocess.run([*CHILD, "kill_everywhere", tmp_path], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *steps, done = result.stdout.split()
    assert done == "done" and steps == sorted(steps) and set(steps) == {"1", "2"}
    assert len(steps) > 30


def check_full_disk(result: subprocess.CompletedProcess, output: Path, cause: str) -> None:
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "could not be saved" in result.stderr and cause in result.stderr
    warnings = [line for line in result.stdout.splitlines() if "warning" in line]
    assert all(line.endswith("it is tried again until the next save") for line in warnings)
    assert not list(output.glob("checkpoints/.*"))  # the partial checkpoint is removed to make room


def test_full_disk_by_file_size_limit(tmp_path):
    result = subprocess.run([*CHILD, "limited_fill", tmp_path], capture_output=True, text=True)
    check_full_disk(result, tmp_path, "File too large")
    assert latest_step(tmp_path) == 1


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        skip("mounting needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk(small_disk):
    result = subprocess.run([*CHILD, "fill_disk", small_disk], capture_output=True, text=True)
    check_full_disk(result, small_disk, "No space left on device")
    fitted = [int(line) for line in result.stdout.splitlines() if line.isdigit()]
    assert latest_step(small_disk) == fitted[-1]
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
        while filler.write(b"x" * 4096):
            pass
    result = subprocess.run([*CHILD, "fill_disk", small_disk], capture_output=True, text=True)
    check_full_disk(result, small_disk, "No space left on device")  # not even the small one fits now
    assert latest_step(small_disk) == 2


def test_a_disk_that_is_full_from_the_start(small_disk):
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError):
        while filler.write(b"x" * 4096):
            pass
    with pytest.raises(UserError, match="expected an output directory that can be written, .*: No space left"):
        OutputDirectory(small_disk / "run", warn=refuse_warning)


def test_second_run_is_refused_until_the_first_is_gone(tmp_path):
    child = subprocess.Popen([*CHILD, "hold", tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError) as error:
            OutputDirectory(tmp_path, warn=refuse_warning)
        assert f"in use by pid {child.pid} on host {socket.gethostname()}" in str(error.value)
        assert "\n" not in str(error.value)
    finally:
        child.kill()
        child.communicate()
    OutputDirectory(tmp_path, warn=refuse_warning).close()


def test_closed_directory_can_be_opened_again(tmp_path):
    output = OutputDirectory(tmp_path, warn=refuse_warning)
    with pytest.raises(UserError, match=f"pid {os.getpid()} "):
        OutputDirectory(tmp_path, warn=refuse_warning)
    output.close()
    output.close()
    with OutputDirectory(tmp_path, warn=refuse_warning):
        pass


@pytest.mark.parametrize("name", ["my host", "a/b", "", "caf\udce9", "name\nof two lines"])
def test_a_host_may_have_any_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    for _ in range(2):  # the second run knows the lock of the first
        with OutputDirectory(tmp_path, warn=refuse_warning):
            write_whole(tmp_path / "config.yaml", "seed: 0")
            assert (tmp_path / ".lock").read_text().split() == ["pid", str(os.getpid()), "on", "host", host_name()]
    (tmp_path / ".lock").write_text("pid 1 on host of an older version\n")
    OutputDirectory(tmp_path, warn=refuse_warning).close()


def test_unwritable_output_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected an output directory that can be written") as error:
        OutputDirectory(tmp_path / "file" / "run", warn=refuse_warning)
    assert "\n" not in str(error.value)


def test_file_system_without_locks_is_said(tmp_path, monkeypatch):
    """A fake flock answers as the kernel does on such a file system."""

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    warnings = []
    OutputDirectory(tmp_path, warn=warnings.append).close()
    assert len(warnings) == 1 and "has no locks (No locks available)" in warnings[0]
