"""Fork processes that have imported a framework: python warm_server.py FOLDER, whose clients are `sitecustomize.py`.

The folder gets a socket for each framework, whose first client has it imported. The server ends with its
standard input.
"""

import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import marshal
import os
import resource
import select
import shutil
import signal
import socket
import sys
import types
from contextlib import suppress

from sitecustomize import import_time

_MODULES = {
    "pytorch": ("torch", "torch.distributed.run", "horovod.torch"),
    "tensorflow": ("tensorflow", "keras", "horovod.tensorflow.keras"),
}
_PARTS = (
    "train",
    "models",
    "networks.small",
    "numerics",
    "optimizers",
    "strategies.horovod",
    "strategies.single",
    "worker",
)
_SHARED = ("tyro", "numpy.random", *(f"allstep.common.{name}" for name in (
    "checkpoint.weights_file", "data.datasets.digits", "data.images.augmented_split", "data.images.rand_augment",
    "data.standardize", "exact.replica_check", "launch.rendezvous", "training.data_digest", "training.evaluation",
    "training.opening", "training.profiling", "training.resuming", "training.same_on_ranks", "training.saving",
    "training.steps_in_flight", "training.training_run", "watch.agent", "watch.monitor", "watch.relay",
)))  # fmt: skip
"""Modules that ranks import only when they need them."""
_PR_SET_PDEATHSIG = 1


def main(folder):
    """Listen for both frameworks; return a request in the fork that is to serve it."""
    listeners = {}
    for framework in _MODULES:
        listeners[framework] = listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder}/{framework}")
        listener.listen(128)
    servers = []
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin, *listeners.values()], [], [])
        if sys.stdin in readable:
            break
        for framework in [name for name, listener in listeners.items() if listener in readable]:
            if pid := os.fork():
                servers.append(pid)
                listeners.pop(framework).close()
                continue
            _die_with_parent()
            for name in listeners.keys() - {framework}:
                listeners[name].close()
            return _serve(listeners[framework], framework)
    for pid in servers:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    shutil.rmtree(folder)
    raise SystemExit


def _die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(listener, framework):
    """Import a framework as trainers do, and fork a process for each client; return its request in the fork."""
    circumstances = import_time(os.environ)
    os.environ.update(circumstances)
    from allstep.common.process.lean_import import lean_import

    with lean_import():
        parts = [f"allstep.{framework}.{name}" for name in _PARTS]
        for module in (*_MODULES[framework], *parts, *_SHARED):
            importlib.import_module(module)
    gc.freeze()
    clients = {}
    ended, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        poll = select.poll()
        for source in (listener, ended, *clients):
            poll.register(source, select.POLLIN)
        readable = {number for number, _ in poll.poll()}
        if ended in readable:
            os.read(ended, 4096)
            _report(clients)
        for connection in [one for one in clients if one.fileno() in readable]:
            _pass_on(connection, clients)
        if listener.fileno() in readable:
            connection, _ = listener.accept()
            request, files = _receive(connection)
            if request["prefix"] != sys.prefix or import_time(request["variables"]) != circumstances:
                connection.sendall(b"-")
                connection.close()
            elif pid := os.fork():
                clients[connection] = pid
                connection.sendall(b"+")
            else:
                signal.set_wakeup_fd(-1)
                for number in (ended, wakes):
                    os.close(number)
                for one in (listener, connection, *clients):
                    one.close()
                return _prepare(request, files)
            for number in files:
                os.close(number)


def _receive(connection):
    header, files, *_ = socket.recv_fds(connection, 8, 250)
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return marshal.loads(data), files


def _report(clients):
    """Tell the clients whose process has ended how it ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        for connection in [one for one in clients if clients[one] == pid]:
            del clients[connection]
            with suppress(OSError):  # the client has been killed
                connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            connection.close()


def _pass_on(connection, clients):
    """Pass on the signals that a client got; if it was killed, kill its fork before any other starts."""
    try:
        signals = connection.recv(64)
    except OSError:
        signals = b""
    for number in signals or [signal.SIGKILL]:
        os.kill(clients[connection], number)
    if not signals:
        os.waitpid(clients.pop(connection), 0)
        connection.close()


def _prepare(request, files):
    """Make this process what the client was when it asked."""
    _die_with_parent()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 500) for number in files]
    for number in files:
        os.close(number)
    for number, wanted in zip(moved, request["files"], strict=True):
        os.dup2(number, wanted)
        os.close(number)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limit)
    os.environ.clear()
    os.environ.update(request["variables"])
    for module in ("random", "numpy.random", "torch"):  # forks have the states of their parent
        if module in sys.modules:
            sys.modules[module].seed()
    if request["unbuffered"]:
        sys.stdout, sys.stderr = (_unbuffered(stream) for stream in (sys.stdout, sys.stderr))
    return request


def _unbuffered(stream):
    """Return a stream to the same file that writes at once, as Python's own do with -u."""
    raw = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)


def program(request):
    """Return the code of the request's program and its module, which is the main module from now on."""
    words = request["words"]
    sys.orig_argv[1:] = request["after_python"]
    module = types.ModuleType("__main__")
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        sys.argv[:], sys.path[0] = [spec.origin, *words[2:]], os.getcwd()
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        code = spec.loader.get_code(spec.name)
    elif words[0] == "-c":
        sys.argv[:], sys.path[0] = ["-c", *words[2:]], ""
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:], sys.path[0] = words, os.path.dirname(os.path.realpath(words[0]))
        module.__file__ = os.path.abspath(words[0])
        with open(words[0], "rb") as file:
            code = compile(file.read(), module.__file__, "exec")
    sys.modules["__main__"] = module
    module.__builtins__ = sys.modules["builtins"]
    return code, module.__dict__


if __name__ == "__main__":
    code, names = program(main(sys.argv[1]))
    # The frame of this file is no part of the program.
    sys.excepthook = lambda kind, error, trace: sys.__excepthook__(
        kind, error.with_traceback(trace and trace.tb_next), None
    )
    exec(code, names)
