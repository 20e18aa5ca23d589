"""Commands of an installation, and diagnoses of failed ones. Oracle: the messages of pip and of a full disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allstep.commands.horovod.logged import CommandFailed, diagnosis, run_logged
from allstep.common.base.errors import UserError

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
    run_logged([sys.executable, "-c", program], log)


def test_a_full_disk(tmp_path):
    with pytest.raises(UserError, match="expected room on the disk, received a full one"):
        fail("open('/dev/full', 'w').write('x' * 10**6)", tmp_path / "log")


def test_any_other_failure_shows_the_end_of_its_own_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("No space left on device\n")  # by an earlier command
    with pytest.raises(CommandFailed) as caught:
        fail("raise SystemExit('out of luck')", log)
    assert "out of luck" in str(caught.value) and "No space" not in str(caught.value)


def test_a_failed_command_shows_the_tail_of_its_log(tmp_path):
    log = tmp_path / "log"
    program = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(CommandFailed) as caught:
        run_logged([sys.executable, "-c", program], log)
    assert "line 99" in str(caught.value)
    assert "line 1\n" not in str(caught.value)
    assert "status 3" in str(caught.value)
    assert str(log) in str(caught.value)
    assert "line 1\n" in log.read_text()


def test_interrupting_kills_the_command_and_its_children(tmp_path):
    pid_file = tmp_path / "pid"

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}; echo started; wait"]
        run_logged(command, tmp_path / "log", progress=interrupt)
    assert is_gone(int(pid_file.read_text()))


@pytest.mark.parametrize("to_its_end", [False, True])
def test_a_killed_installation_leaves_no_compiler_but_lets_pip_write_its_last_file(tmp_path, to_its_end):
    shell = f"sleep {1 if to_its_end else 600} & echo $! > {tmp_path}/pid; echo started; wait; touch {tmp_path}/written"
    program = (
        "import sys; from pathlib import Path; from allstep.commands.horovod.logged import run_logged\n"
        f"run_logged(['sh', '-c', sys.argv[1]], Path(sys.argv[2]), to_its_end={to_its_end})"
    )
    log = tmp_path / "log"
    installation = subprocess.Popen([sys.executable, "-c", program, shell, log])
    while not (log.exists() and "\nstarted" in log.read_text()):
        assert installation.poll() is None
        time.sleep(0.05)
    installation.kill()
    installation.wait()
    assert is_gone(int((tmp_path / "pid").read_text()))
    for _ in range(100 * to_its_end):
        if (tmp_path / "written").exists():
            break
        time.sleep(0.1)
    assert (tmp_path / "written").exists() == to_its_end


def is_gone(pid: int) -> bool:
    """Return whether the process ends within 10 s; a killed one may stay for a moment until init has reaped it."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False
