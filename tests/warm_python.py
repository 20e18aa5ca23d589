"""Trainers that start warm: in forks of a process that has imported their framework, which takes seconds otherwise.

`tests/ranks.py` puts this file in front of a trainer, alone and under launchers (`warm`). The file then is a process
that asks for a fork, passes its arguments, environment, folder and open files on, forwards signals, and ends as the
fork does; if it is killed, so is the fork. With a variable that an import may read, or ALLSTEP_COLD, it starts cold.
"""

import os
import re
import signal
import socket
import sys

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_MAX_REQUEST, _MAX_FILES = 2**18, 32
_MODULES = {
    "pytorch": ("allstep.pytorch.train", "torchvision", "allstep.pytorch.worker", "allstep.pytorch.strategies.single"),
    "tensorflow": ("allstep.tensorflow.train", "allstep.tensorflow.worker", "allstep.tensorflow.strategies.single"),
}
_ALL = ("allstep.common.training.training_run", "allstep.common.training.opening", "tyro", "yaml", "safetensors")
_EARLY = re.compile(
    "(OMP_|MKL|KMP|GOMP|OPENBLAS|XLA|KERAS|CUDA|TF(?!_CONFIG)|TORCH(?!ELASTIC|INDUCTOR)|PYTORCH|PYTHON(?!UNBUFFERED)"
    "|LD_|MALLOC|GLIBC|HOME|TMPDIR|XDG|LANG|LC_).*"
)
"""Variables that an import may read."""
_servers: dict[str, tuple] = {}


def warm(command: list[str], environ: dict[str, str]) -> list[str]:
    """Return the command with a warm trainer in it, if it has a trainer.

    Args:
        environ: environment of the process that imports, should this be the first.
    """
    for number, (python, program) in enumerate(zip(command, command[1:], strict=False)):
        if python in ("python", sys.executable) and (framework := _framework(program, command[number + 2 :])):
            return [*command[:number], *_client(framework, environ), *command[number + 1 :]]
    return command


def _framework(program: str, arguments: list[str]) -> str | None:
    """Return the framework of a trainer, or of a program in tests/ that names one in its path or arguments."""
    if program.endswith("/train.py"):
        names = [name for name in _MODULES if program.endswith(f"{name}/train.py")]
    elif os.path.abspath(program).startswith(_PROGRAMS) and not program.endswith("lean.py"):
        words = {*os.path.relpath(program, _TESTS).split(os.sep), *arguments}
        names = [name for name in _MODULES if name in words]
    else:
        names = []
    return names[0] if len(names) == 1 else None


_TESTS = os.path.dirname(os.path.abspath(__file__))
_PROGRAMS = tuple(os.path.join(_TESTS, name) + os.sep for name in ("launch", "pytorch", "tensorflow", "strangers"))


def _client(framework: str, environ: dict[str, str]) -> list[str]:
    """Return the words that start a warm program; the process that forks ends with this process."""
    import subprocess
    import tempfile

    if framework not in _servers:
        folder = tempfile.TemporaryDirectory(prefix="allstep-warm-")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.path.join(folder.name, framework))
            listener.listen(64)
            words = [sys.executable, __file__, "--serve", str(listener.fileno()), *_MODULES[framework], *_ALL]
            files, pipe = [listener.fileno()], subprocess.PIPE
            server = subprocess.Popen(words, env=environ, stdin=pipe, pass_fds=files, start_new_session=True)
        _servers[framework] = folder, server
    return [sys.executable, "-I", "-S", __file__, os.path.join(_servers[framework][0].name, framework)]


def ask(path: str, argv: list[str]) -> None:
    """Have a fork run a program, and end as it does; run it in this process if it must start cold."""
    import json

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        files = [one for one in map(int, os.listdir("/proc/self/fd")) if one != connection.fileno() and _is_open(one)]
        request = {"argv": argv, "words": sys.orig_argv, "folder": os.getcwd(), "environ": dict(os.environ)}
        connection.connect(path)
        socket.send_fds(connection, [json.dumps({**request, "files": files}).encode()], files)
        program = int(connection.recv(16))
        if not program:
            os.execv(sys.executable, [sys.executable, *argv])
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(program, number))
        status = int(connection.recv(16) or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def serve(listener: socket.socket, usual: dict[str, str]) -> None:
    """Fork a process for each request, and return in it, ready to run the program.

    Args:
        usual: the environment before the imports.
    """
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the processes that watch programs
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            if _watch_or_become(connection, usual):
                return
        connection.close()
    os._exit(0)


def _watch_or_become(connection: socket.socket, usual: dict[str, str]) -> bool:
    """Fork the program, in which this returns true, and report how it ends; kill it when its client is gone."""
    import json
    import select

    data, files, _, _ = socket.recv_fds(connection, _MAX_REQUEST, _MAX_FILES)
    request, made = json.loads(data), dict(os.environ.items() - usual.items())  # made by the imports
    changed = {*usual.items(), *made.items()} ^ {*request["environ"].items(), *made.items()}
    early = any(_EARLY.fullmatch(name) for name, _ in changed)
    if early or "ALLSTEP_COLD" in request["environ"] or "--elastic" in request["argv"]:
        connection.send(b"0")
        os._exit(0)
    program = os.fork()
    if program == 0:
        connection.close()
        _become(request, files, made)
        return True
    for descriptor in files:
        os.close(descriptor)
    connection.send(str(program).encode())
    if connection in select.select([connection, os.pidfd_open(program)], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    status = os.waitpid(program, 0)[1]
    try:
        connection.send(str(status).encode())
    finally:
        os._exit(0)


def _become(request: dict, files: list[int], made: dict[str, str]) -> None:
    import fcntl

    os.setsid()
    copies = [fcntl.fcntl(one, fcntl.F_DUPFD, 256) for one in files]
    os.closerange(0, 256)
    for copy, descriptor in zip(copies, request["files"], strict=True):
        os.dup2(copy, descriptor)
        os.close(copy)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**request["environ"], **made})
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = request["words"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if "PYTHONUNBUFFERED" in os.environ:
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        ask(sys.argv[1], sys.argv[2:])
    import gc
    import importlib
    import runpy

    before = dict(os.environ)
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[2])), before)
    runpy.run_path(sys.argv[0], run_name="__main__")
