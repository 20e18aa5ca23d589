"""Diagnoses of `make setup` for failed commands. Oracle: the messages of pip and of a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from console import CommandFailed, SetupError, diagnosis, run_logged

pytestmark = pytest.mark.launch


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--isolated", "download", "--retries", "1", "--no-deps", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


def test_nobody_listens(tmp_path):
    output = pip("--index-url", "http://127.0.0.1:9/simple", "-d", str(tmp_path), "no-such-package")
    assert "has no-such-package, received none that answers ([Errno 111] Connection refused)" in diagnosis(output)


def test_a_name_without_an_address(tmp_path):
    output = pip("--index-url", "https://index.invalid/simple", "-d", str(tmp_path), "no-such-package")
    assert "received none that answers (" in diagnosis(output)


def test_an_index_without_the_package(tmp_path):
    output = pip("--no-index", "--find-links", str(tmp_path), "-d", str(tmp_path), "no-such-package")
    assert "received one without it" in diagnosis(output)


def fail(program: str, log: Path) -> None:
    run_logged([sys.executable, "-c", program], log, progress=lambda line: None)


def test_a_full_disk(tmp_path):
    with pytest.raises(SetupError, match="expected room on the disk, received a full one"):
        fail("open('/dev/full', 'w').write('x' * 10**6)", tmp_path / "log")


def test_any_other_failure_shows_the_end_of_its_own_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("No space left on device\n")  # by an earlier command
    with pytest.raises(CommandFailed) as caught:
        fail("raise SystemExit('out of luck')", log)
    assert "out of luck" in str(caught.value) and "No space" not in str(caught.value)
