"""Run Python commands in processes forked from one that has imported what they need; see `fork_server.py`.

ALLSTEP_NO_FORK=1 has each start an interpreter of its own instead, which takes seconds longer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fork_client import request

_SERVER, _CLIENT = (Path(__file__).with_name(f"fork_{name}.py") for name in ("server", "client"))
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
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        outputs = [stdout.fileno(), stderr.fileno()]
        connection = request(socket_of(server), list(words), folder=str(folder), environ=dict(environ), outputs=outputs)
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


def python(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the command for launchers to start `python WORDS`, from a fork server if that has what it needs."""
    if server := server_of(words, environ):
        return [sys.executable, "-I", "-S", str(_CLIENT), socket_of(server), *words]
    return [sys.executable, *words]


def server_of(words: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the server for `python WORDS`; None if it needs an interpreter of its own.

    The program has to name a single framework. Variables that libraries read when they are imported have to be those
    of the server.
    """
    from ranks import REPOSITORY, environment

    script = REPOSITORY / words[0] if words else REPOSITORY
    if os.environ.get("ALLSTEP_NO_FORK") == "1" or environ != environment() or not script.is_file():
        return None
    text = " ".join([script.read_text(), *(words if "open_session" in script.read_text() else ())])
    named = [name for name in ("pytorch", "tensorflow") if re.search(rf"allstep\.{name}\b| {name} ", text)]
    return named[0] if len(named) == 1 else None


def socket_of(server: str) -> str:
    """Return the path of the socket of a server, which is started if it does not run yet."""
    process, path = _started(server, os.getpid())
    while not Path(path).exists():
        assert process.poll() is None, "the fork server has ended"
        time.sleep(0.01)
    return path


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
