"""Simulated hosts on this machine, made by two_hosts.sh: a user on `launcher` reaches server1 and server2 by ssh.

Tests that import this module are skipped without root or one of a few programs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ranks
from ranks import REPOSITORY, Result, environment
from requirements import need, skip

from allstep.commands.soak.training import PATIENCE_SECONDS

TWO_HOSTS = Path(__file__).with_name("two_hosts.sh")

need("unshare", "nsenter", "ip", "ss", "ssh", "ssh-keygen", "sshd", root=True)
_trial = subprocess.run([TWO_HOSTS, "1", "ssh", "server1", "true"], capture_output=True, text=True)
if _trial.returncode:
    skip(f"this machine gives no namespaces: {_trial.stderr.strip()}")


def run(*command: str | Path, num_hosts: int = 2, timeout: float = 240, **extra: str) -> Result:
    """Run a command on the launcher host, in the repository, until it ends; then remove all hosts."""
    return ranks.run(TWO_HOSTS, str(num_hosts), *command, timeout=timeout, **extra)


@dataclass
class Job:
    """A command that runs on the launcher host."""

    process: subprocess.Popen
    output: Path
    """File with the command's output, including standard error."""

    def first_process(self) -> str:
        """Return the process id, on this machine, of the launcher host's first process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.wait_until(lambda: children.read_text() != "")
        return children.read_text().split()[0]

    def inside(self, *command: str | Path) -> str:
        """Run another command on the launcher host meanwhile and return its output."""
        enter = ("nsenter", "-t", self.first_process(), "--net", "--mount", "--uts", "--ipc", "--pid")
        words = [*enter, *map(str, command)]
        return subprocess.run(words, check=True, capture_output=True, text=True, env=environment()).stdout

    def commands_on(self, host: str) -> list[str]:
        """Return the command line of each process on `host`."""
        show = "for process in $(ip netns pids $0); do tr '\\0' ' ' </proc/$process/cmdline; echo; done 2>/dev/null"
        return self.inside("bash", "-c", show, host).splitlines()

    def listening(self) -> set[tuple[str, str]]:
        """Return address and program of each listening socket on the launcher host."""
        lines = [line.split(None, 6) for line in self.inside("ss", "-Hltunp").splitlines()]
        # A socket whose program is just ending has none any more.
        return {(line[4].rpartition(":")[0], line[6].split('"')[1]) for line in lines if len(line) > 6}

    def wait_until(self, happened: Callable[[], bool], timeout: float = PATIENCE_SECONDS) -> None:
        """Wait until `happened()` is true, and fail if the command ends before that."""
        deadline = time.monotonic() + timeout
        while not happened():
            ended = self.process.poll() is not None
            assert not ended and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)


@contextmanager
def running(*command: str | Path, output: Path, num_hosts: int = 2, **extra: str) -> Iterator[Job]:
    """Start a command on the launcher host, and remove all hosts at the end of the block.

    Args:
        output: file for the command's output.
    """
    with output.open("w") as stream:
        process = subprocess.Popen(
            [TWO_HOSTS, str(num_hosts), *map(str, command)],
            cwd=REPOSITORY,
            env=environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Job(process, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
