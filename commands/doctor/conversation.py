"""Client of the doctor's agents, which it starts on each host by non-interactive ssh, or locally without ssh."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from allstep.commands.doctor.agent import MARK, Hello, Question
from allstep.commands.doctor.finding import Finding, fault
from allstep.common.base.errors import quoted
from allstep.common.files import strict_json
from allstep.common.files.strict_json import Mismatch, from_json, to_json

Answer = TypeVar("Answer")

SSH_SECONDS = 10
# The agent imports PyTorch and TensorFlow meanwhile, perhaps from a network file system with a cold cache.
ANSWER_SECONDS = 120
_MAX_BYTES = 2**24
_NUM_HELLOS = 5


class NoAnswer(Exception):
    """No agent, or no valid answer; `finding` gives the reason."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


@dataclass(frozen=True)
class Clock:
    """Offset of a host's clock from the local one."""

    seconds_ahead: float
    uncertainty: float
    """Half of the round-trip time."""


class Agent:
    """Connection to the doctor's agent on one host."""

    def __init__(self, host: str, flags: Sequence[str], *, is_here: bool) -> None:
        command = [sys.executable, "-m", "allstep.commands.doctor.agent", *flags]
        self.host, self.is_here = host, is_here
        if not is_here:
            there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
            options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS}")
            command = ["ssh", *options, host, there]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)

    def ask(self, question: Question, kind: type[Answer]) -> Answer:
        """Return the agent's answer to a question. Raises NoAnswer if there is none, or it is not a `kind`."""
        assert self._process.stdin and self._process.stdout  # both are pipes
        limit = threading.Timer(ANSWER_SECONDS, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(to_json(question)).encode() + b"\n")
            self._process.stdin.flush()
            while line := self._process.stdout.readline(_MAX_BYTES):
                if line.startswith(MARK.encode()):
                    return from_json(kind, strict_json.loads(line[len(MARK) :]), f"the answer of {self.host}")
        except BrokenPipeError:
            pass  # the agent has exited, and printed the reason to standard error
        except (strict_json.NotJson, Mismatch) as error:
            raise NoAnswer(fault("ssh", f"answers with something else: {error}", _SAME_VERSION)) from None
        finally:
            limit.cancel()
        _, errors = self._process.communicate()
        raise NoAnswer(why_gone(self.host, self._process.returncode, errors.decode(errors="replace")))

    def clock(self) -> tuple[Clock, int]:
        """Return the offset of the host's clock, from the fastest of a few answers, and the agent's port."""
        readings = []
        for _ in range(_NUM_HELLOS):
            asked = time.time()
            hello = self.ask(Question("hello"), Hello)
            answered = time.time()
            half = (answered - asked) / 2
            readings.append((half, hello.unix_time - asked - half, hello.port))
        half, ahead, port = min(readings)
        return Clock(ahead, half), port

    def end(self) -> None:
        """Close the agent's input, upon which it exits."""
        try:
            self._process.communicate(timeout=SSH_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


_SAME_VERSION = "have the same version of the repository there"
_SSH_REASONS = (
    ("Host key verification failed", "asks whether the host's key is right", "log in once interactively: ssh {host}"),
    ("Permission denied", "asks for a password or a passphrase", "install your key: ssh-copy-id {host}; run ssh-agent"),
    ("Could not resolve", "its name is not known", "correct the name, or add it to /etc/hosts or ~/.ssh/config"),
    ("Connection refused", "nothing listens at its port of ssh", "start sshd there"),
    ("timed out", "does not answer", "look whether it is up, and whether a firewall drops port 22"),
    ("No route", "there is no way to it", "look whether it is up, and at ip route"),
)


def why_gone(host: str, status: int, errors: str) -> Finding:
    """Return the reason for which an agent has exited, from its status and standard error.

    `status` is that of ssh, which uses 255 for its own failures, or of a local agent.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = quoted(lines[-1]) if lines else f"status {status}"
    if status == 255:
        for sign, found, fix in _SSH_REASONS:
            if sign in errors:
                return fault("ssh", found, fix.format(host=host))
        return fault("ssh", f"fails: {last}", f"try ssh -o BatchMode=yes {host} true")
    if status < 0:
        return fault("ssh", f"gave no answer within {ANSWER_SECONDS} s", f"look at its load and its disks: ssh {host}")
    same_path = f"have the checkout and its .venv at {os.getcwd()}, as here: by a shared disk, or by make setup there"
    if "No module named" in errors or status in (1, 2, 126, 127) and "Traceback" not in errors:
        return fault("checkout", f"no allstep at the path that it has here: {last}", same_path)
    return fault("ssh", f"the doctor there failed: {last}", _SAME_VERSION)


def is_this_host(name: str) -> bool:
    """Return whether a name means this host, where ranks are started without ssh."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # fails for an address of another host
        except OSError:
            return False
    return True
