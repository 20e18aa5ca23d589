"""Run Python commands in processes forked from one that has imported what they need; see `fork_server.py`.

ALLSTEP_NO_FORK=1 has each start an interpreter of its own instead, which takes seconds longer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

_SERVER = Path(__file__).with_name("fork_server.py")
_COMMON = ("tyro", "yaml", "numpy", "allstep.common.cli.command_line", "allstep.common.training.resuming")
_MODULES = {
    "pytorch": (*_COMMON, "allstep.pytorch.train", "allstep.common.training.training_run", "allstep.pytorch.worker",
                "allstep.pytorch.models", "allstep.pytorch.optimizers", "allstep.pytorch.numerics"),
    "tensorflow": (*_COMMON, "allstep.tensorflow.train", "allstep.common.training.training_run",
                   "allstep.tensorflow.worker", "allstep.tensorflow.models", "allstep.tensorflow.optimizers",
                   "allstep.tensorflow.numerics"),
    "neither": _COMMON,
}  # fmt: skip


def run(
    server: str, folder: Path, words: Sequence[str], environ: Mapping[str, str], *, timeout: float
) -> tuple[int, str, str]:
    """Run `python WORDS` and return its exit status and output; kill its process group after `timeout` seconds.

    Args:
        server: `pytorch`, `tensorflow` or `neither`: the framework that the process has imported when it starts.

    Raises:
        AssertionError: the command did not end.
    """
    request = json.dumps({"folder": str(folder), "words": list(words), "environ": dict(environ)})
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, _connected(server) as connection:
        message = request.encode()
        socket.send_fds(connection, [message[:1]], [stdout.fileno(), stderr.fileno()])
        connection.sendall(message[1:])
        connection.shutdown(socket.SHUT_WR)
        answers = connection.makefile()
        child = int(answers.readline())
        connection.settimeout(timeout)
        try:
            status = int(answers.readline())
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            raise AssertionError(f"{words} did not end in {timeout} s\n{_text(stdout)}\n{_text(stderr)}") from None
        return status, _text(stdout), _text(stderr)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def server_of(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the server for a command; None if it needs an interpreter of its own.

    Variables that libraries read when they are imported have to be those of the server.
    """
    from ranks import BIN, environment

    if os.environ.get("ALLSTEP_NO_FORK") == "1" or environ != environment():
        return None
    if len(command) < 2 or command[0] not in (sys.executable, "python", str(BIN / "python")):
        return None
    *_, folder, name = ("", *Path(command[1]).parts)
    return folder if name == "train.py" and folder in ("pytorch", "tensorflow") else None


def _connected(server: str) -> socket.socket:
    process, path = _started(server, os.getpid())
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            assert process.poll() is None, "the fork server has ended"
            time.sleep(0.01)


@functools.cache
def _started(server: str, _pid: int) -> tuple[subprocess.Popen, str]:
    from ranks import environment

    folder = tempfile.mkdtemp()
    path = str(Path(folder) / "socket")
    environ = environment(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="2")
    command = [sys.executable, _SERVER, path, *_MODULES[server]]
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, start_new_session=True)

    def end() -> None:
        process.terminate()
        process.wait()
        with contextlib.suppress(OSError):
            os.unlink(path)
            os.rmdir(folder)

    atexit.register(end)
    return process, path
