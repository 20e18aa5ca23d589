"""Fork processes that have imported a framework, for the clients of `warm_client.py`.

warm_server.py FOLDER            makes sockets in the folder, starts the servers when they are first asked for, and ends
                                 them with its standard input
warm_server.py FRAMEWORK SOCKET  is such a server: it forks a process for each client, which forks the client's program
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import io
import marshal
import multiprocessing.process
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
import weakref
from contextlib import suppress

from warm_client import ENTERED, NUM_SERVERS, TRAINERS, circumstances, import_next_sitecustomize

_MODULES = {
    "pytorch": ("torch", "torch.distributed.run", "torch._dynamo", "torch.distributed.fsdp", "horovod.torch"),
    "tensorflow": ("tensorflow", "keras", "horovod.tensorflow.keras"),
}
_PARTS = (
    "train",
    "models",
    "networks.sequences",
    "numerics",
    "optimizers",
    "strategies.horovod",
    "strategies.strategy",
    "worker",
)
_SHARED = ("numpy.random", "safetensors.numpy", "yaml", *(f"allstep.common.{name}" for name in (
    "checkpoint.weights_file", "data.datasets.digits", "data.images.augmented_split",
    "exact.replica_check", "launch.rendezvous", "training.metrics",
    "training.opening", "training.profiling", "training.resuming", "training.same_on_ranks", "training.saving",
    "training.steps_in_flight", "training.training_run", "watch.agent", "watch.monitor", "watch.relay",
)))  # fmt: skip
"""Modules that ranks import only when they need them."""
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.02
"""Time after which a fork is stopped when its client is, or goes on when it does."""
_imported = {}
"""Modules that the server has imported."""


def keep_servers(folder):
    """Start each server when its first client connects; end all when standard input ends."""
    listeners = {}
    for name in _MODULES:
        for number in range(NUM_SERVERS):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/{name}{number}")
            listener.listen(128)
            listeners[listener] = name
    servers = []
    print("ready", flush=True)
    while sys.stdin not in (readable := select.select([sys.stdin, *listeners], [], [])[0]):
        for listener in readable:
            command = [sys.executable, __file__, listeners.pop(listener), str(listener.fileno())]
            servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()]))
            listener.close()
    for server in servers:
        server.kill()
        server.wait()
    shutil.rmtree(folder)


def _parse_flags():
    """Import what tyro imports when it is used, and fill the caches of what it compiles."""
    from allstep.common.cli.command_line import parse
    from allstep.common.launch.placement import ALONE

    parse(("single",), ALONE, ["--strategy", "single"])


def _keep_imported():
    """Take the server's modules out of those that the interpreter clears as it ends."""
    for name in _imported:
        sys.modules.pop(name, None)


atexit.register(_keep_imported)  # before the frameworks register functions, so that it is called last


def _die_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(framework, listener):
    """Import a framework as trainers do, and fork a process for each client; return its request in the program's."""
    _die_with_parent()
    own = circumstances()
    os.environ.update({name: own[name] for name in TRAINERS})
    before = dict(os.environ)
    from allstep.common.process.lean_import import lean_import

    with lean_import():
        parts = [f"allstep.{framework}.{name}" for name in _PARTS]
        for module in (*_MODULES[framework], *parts, *_SHARED):
            importlib.import_module(module)
    importlib.import_module("sklearn.datasets")
    _parse_flags()
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert len(os.listdir("/proc/self/task")) == 1  # a fork has one thread
    files = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    assert sorted(map(int, files)) == [0, 1, 2, listener.fileno()]  # a fork has the files of its client alone
    _end_early()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            if request := _attend(connection, own):
                os.environ.update(changed)
                return request
        connection.close()


def _end_early():
    """Have forks end without what the imported modules and libraries do then: up to 0.4 s of a short program's 1 s."""
    _imported.update((name, sys.modules[name]) for name in sys.modules.keys() - {"sys", "builtins", "__main__"})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))  # so that it is never cleared
    for finalizer in weakref.finalize._registry:  # PyTorch's libraries unregister their operators one by one
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # which gets the status; exit() calls the functions of libraries in reverse order
    libc.__cxa_atexit(libc.fflush, None, None)


def _attend(connection, own):
    """Start a client's program and pass on to it the signals that the client gets; return the request in the program.

    If the client is killed, so is the program, with its process group; if it is stopped, so is the program.
    """
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files = _receive(connection)
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        handle, state = os.pidfd_open(client), os.open(f"/proc/{client}/stat", os.O_RDONLY)
    except OSError:  # it has been killed
        os._exit(0)
    if _refusal(request, own) or not _follow(request, client, handle):
        connection.sendall(b"-")
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not (pid := os.fork()):
        for number in (connection.detach(), handle, state):
            os.close(number)
        _prepare(request, files)
        return request
    for number in files:
        os.close(number)
    connection.sendall(b"+")
    ended, is_stopped = os.pidfd_open(pid), False
    while ended not in (readable := select.select([connection, ended], [], [], _LOOK_SECONDS)[0]):
        if connection not in readable:
            if is_stopped != (is_stopped := _is_stopped(state)):
                os.kill(pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
        elif signals := _received(connection):
            for number in signals:
                os.kill(pid, number)
        else:
            for kill in (os.killpg, os.kill):  # its group may not be made yet
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
            break
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # the client has been killed
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
        if os.WIFSIGNALED(status) and _is_stopped(state):
            signal.pidfd_send_signal(handle, os.WTERMSIG(status))
    os._exit(0)


def _is_stopped(state):
    """Return whether a process is stopped, by its opened file of /proc."""
    with suppress(ProcessLookupError):
        return os.pread(state, 1000, 0).rpartition(b") ")[2][:1] == b"T"
    return False


def _follow(request, client, handle):
    """Enter the client's groups and have the next fork be in its namespaces; return whether that is allowed."""
    flags = 0
    for kind, flag in ENTERED.items():
        if os.readlink(f"/proc/{client}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"):
            flags |= flag
    if request["groups"] != os.getgroups():
        if os.geteuid():
            return False
        os.setgroups(request["groups"])
    return not flags or not ctypes.CDLL(None).setns(handle, flags)


def _receive(connection):
    header, files, *_ = socket.recv_fds(connection, 8, 250)
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            os._exit(0)  # the client has been killed
        data += part
    return marshal.loads(data), files


def _received(connection):
    with suppress(OSError):
        return connection.recv(64)


def _refusal(request, own):
    """Return why a fork would differ from the client; empty if it would not."""
    theirs = request["circumstances"]
    if different := [name for name in {**theirs, **own} if theirs.get(name) != own.get(name)]:
        return f"other {different}"
    # A module beside the program comes before an installed one of its name, which is imported here.
    for folder in (_first_on_path(request["words"], request["folder"]), *request["others"]):
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            name, _, ending = entry.name.partition(".")
            is_module = ending in ("py", "pyc") or ending.endswith("so") or os.path.exists(f"{entry.path}/__init__.py")
            if is_module and name in sys.modules and name != "sitecustomize":
                return f"{entry.path} is another module than the one that is imported"
    return ""


def _first_on_path(words, folder):
    return folder if words[0] in ("-m", "-c") else os.path.dirname(os.path.realpath(os.path.join(folder, words[0])))


def _prepare(request, files):
    """Make this process what the client was when it asked."""
    os.setpgid(0, 0)  # which the program may kill
    _die_with_parent()
    free = max(*files, *request["files"]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in files]
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
    # What modules have noted of the process that imported them.
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = request["folder"]
    multiprocessing.current_process().authkey = os.urandom(32)
    for module in ("random", "numpy.random", "torch"):
        if module in sys.modules:
            sys.modules[module].seed()
    if request["unbuffered"]:
        sys.stdout, sys.stderr = (_unbuffered(stream) for stream in (sys.stdout, sys.stderr))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)  # _IONBF, as Python does with -u
    else:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    sys.executable = request["executable"]
    sys.orig_argv[:] = request["orig_argv"]
    sys.path[:] = [*request["others"], *sys.path[1:]]
    for number in range(1, signal.NSIG):
        if number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])


def _unbuffered(stream):
    """Return a stream to the same file that writes at once, as Python's own do with -u."""
    raw = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
    raw.name = stream.name
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)


def program(request):
    """Return the code of the request's program and its module, which is the main module from now on."""
    words = request["words"]
    sys.argv[:] = words if words[0] not in ("-m", "-c") else [words[0], *words[2:]]
    import_next_sitecustomize()
    sys.path.insert(0, _first_on_path(words, request["folder"]))
    module = types.ModuleType("__main__")
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        sys.argv[0] = spec.origin
        module.__spec__, module.__file__, module.__package__ = spec, spec.origin, spec.parent
        code = spec.loader.get_code(spec.name)
    elif words[0] == "-c":
        sys.path[0] = ""
        code = compile(words[1], "<string>", "exec")
    else:
        module.__file__ = os.path.abspath(words[0])
        with open(words[0], "rb") as file:
            code = compile(file.read(), module.__file__, "exec")
    sys.modules["__main__"] = module
    module.__builtins__ = sys.modules["builtins"]
    return code, module.__dict__


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(keep_servers(sys.argv[1]))
    request = serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
    # The frame of this file is no part of the program.
    sys.excepthook = lambda kind, error, trace: sys.__excepthook__(
        kind, error.with_traceback(trace and trace.tb_next), None
    )
    exec(*program(request))  # whose names no variable holds, so that they are cleared at the end
