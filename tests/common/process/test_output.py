"""Standard output that is lost: its reader is gone, its device is full, its descriptor is closed. Oracle: the shell."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import subprocess
import sys

import pytest
from ranks import REPOSITORY, environment, full

from allstep.common.process.output import ending_output

pytestmark = pytest.mark.cold

FULL = "allstep: error: standard output cannot be written: No space left on device; make room, or send it elsewhere\n"
LOSSES = {
    "| true": (141, ""),
    "> /dev/full": (2, FULL),
    ">&-": (0, ""),
    ">&- 2>&- <&-": (0, ""),
    "> /dev/full 2> /dev/full": (2, ""),
    "2>&-": (2, ""),
}
"""How standard output is lost, with the exit status and what is told."""
COMMANDS = (
    *((("allstep", "--help"), rest) for rest in LOSSES if rest != "2>&-"),
    (("allstep", "hosts", "-H", "localhost:4"), "| true"),
    (("allstep", "hosts"), "2>&-"),
    ((sys.executable, "pytorch/train.py", "--help"), "| true"),
    ((sys.executable, "pytorch/train.py", "--help"), "> /dev/full"),
)
TRAINING = (sys.executable, "pytorch/train.py", "--model", "mlp", "--epochs", "3", "--output-dir")


def test_code_of_users_closes_no_output(capfd):
    with ending_output():
        sys.stdout.close()
        sys.stderr.close()
        print("still open")
    assert capfd.readouterr().out == "still open\n"


@pytest.mark.launch
def test_a_rank_whose_launcher_is_gone_says_so_on_the_terminal():
    """A second Ctrl-C ends mpirun at once, and with it the reader of its ranks' standard error."""
    program = (
        "import os; from allstep.common.process import exit\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)\n"
        "setattr(exit, '_launcher', {})\n"
        "exit.leave(1, 'allstep: its launcher is gone')"
    )
    for launcher, expected in (("-1", b"allstep: its launcher is gone\r\n"), ("os.getppid()", b"")):
        pid, terminal = pty.fork()
        if not pid:
            os.execv(sys.executable, [sys.executable, "-c", program.format(launcher)])
        told = b""
        with contextlib.suppress(OSError):  # at its end
            while data := os.read(terminal, 1000):
                told += data
        assert (told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) == (expected, 1)
        os.close(terminal)


def shell(command: tuple, rest: str) -> subprocess.CompletedProcess:
    """Run a command by bash, and return the command's own status."""
    line = f"{shlex.join(map(str, command))} {rest}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", line], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(("command", "rest"), COMMANDS, ids=str)
def test_commands_end_without_a_traceback(command, rest):
    result = shell(command, rest)
    status, told = LOSSES[rest]
    assert (result.returncode, result.stdout, result.stderr) == (status, "", told)


@pytest.mark.parametrize(
    ("rest", "lost"),
    [("| head -1", "nobody reads it any more"), full("> /dev/full", "No space left on device"), (">&-", "")],
)
def test_training_goes_on(rest, lost, tmp_path):
    result = shell((*TRAINING, tmp_path), rest)
    assert result.returncode == 0
    told = [f"allstep: warning: standard output is lost ({lost}); training goes on"] if lost else []
    assert result.stderr.splitlines() == told
    events = [json.loads(line)["event"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events.count("epoch") == 3 and events[-1] == "end"
