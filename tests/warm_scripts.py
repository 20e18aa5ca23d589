"""Observe scripts of the corpus on ranks that are forks of a process that has imported the frameworks."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ranks import environment

from allstep.commands.prove.launching import ITSELF, MIRRORED, TF_CONFIG, Script

_PROGRAM = Path(__file__).parent / "prove" / "programs" / "warm_ranks.py"
_OBSERVERS = "allstep.commands.prove.observer"
_MODULES = {
    "torch": ("torch", "torch._dynamo", "horovod.torch", f"{_OBSERVERS}.horovod_pytorch"),
    "keras": (
        "tensorflow",
        "keras",
        "horovod.tensorflow",
        f"{_OBSERVERS}.horovod_tensorflow",
        f"{_OBSERVERS}.keras_fit",
    ),
}


class WarmScript(Script):
    """Script whose launcher is a client of a process that forks the ranks."""

    def _commands(self, num_ranks: int) -> list[list[str]]:
        if self.launcher == ITSELF:
            return super()._commands(num_ranks)
        if self.launcher == TF_CONFIG:
            configurations = [command[:2] for command in super()._commands(num_ranks)]
            return [[*one, *self._client(1)] for one in configurations]
        return [self._client(1 if self.launcher == MIRRORED else num_ranks)]

    def _client(self, num_processes: int) -> list[str]:
        own = (str(_PROGRAM), str(_socket(self._framework)), self.launcher, str(num_processes))
        return [sys.executable, "-I", "-S", *own, *map(str, (self.path, *self.arguments))]

    @property
    def _framework(self) -> str:
        return "keras" if "keras" in self.path.read_text() else "torch"


_servers = contextlib.ExitStack()


@functools.cache
def _socket(framework: str) -> Path:
    """Start a server with a framework once, and return its socket."""
    folder = Path(_servers.enter_context(tempfile.TemporaryDirectory()))
    command = [sys.executable, str(_PROGRAM), "serve", str(folder / "socket"), *_MODULES[framework]]
    process = _servers.enter_context(subprocess.Popen(command, env=environment(WARM_FOLDER="")))
    _servers.callback(process.kill)
    while not (folder / "socket").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return folder / "socket"


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """End all servers after the block."""
    with _servers:
        yield
