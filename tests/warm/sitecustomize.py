"""Let a new Python process be a fork of one that has imported a framework, which takes most of a short run.

Python imports this module at its start where `tests/warm` is in PYTHONPATH. A process that is about to run a program of
PyTorch's or TensorFlow's asks the server of `warm_server.py` for a fork that runs it with the same words, folder,
variables, limits and open files, passes signals on to it, and ends as it ends. All other processes go on as they are.
"""

import os
import sys

_FRAMEWORKS = {
    "pytorch": rb"torch|horovod\.torch|allstep\.pytorch",
    "tensorflow": rb"tensorflow|keras|horovod\.tensorflow|allstep\.tensorflow",
}
IMPORT_TIME = (
    *("OMP_", "MKL_", "KMP_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_LOGS", "KERAS_", "XLA_", "CUDA_", "LD_", "MALLOC_"),
    *("TF_CPP", "TF_ENABLE", "TF_FORCE", "TF_USE", "TF_XLA", "TF_LEGACY", "PYTHON", "LC_", "LANG"),
)
"""Beginnings of the names of variables that Python or a framework reads while it is imported."""
_LATER = {"PYTHONUNBUFFERED", "PYTHONPATH"}


def import_time(variables):
    """Return the variables that must be the same in the server and in a process that it stands in for."""
    defaults = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}  # as trainers set them
    named = {name: value for name, value in variables.items() if name.startswith(IMPORT_TIME) and name not in _LATER}
    return {**defaults, **named}


def _request():
    """Return the framework and how Python was started, or None if this process runs something else."""
    words = sys.orig_argv[1:]
    unbuffered = words[:1] == ["-u"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    words = words[words[:1] == ["-u"] :]
    found = _frameworks(words) if words else ()
    return (*found, unbuffered, words) if len(found) == 1 else None


def _frameworks(words):
    """Return the frameworks that a program names or imports; its arguments decide about one that imports both."""
    given = {word.rpartition("-")[2] for word in words[1:]} & _FRAMEWORKS.keys()
    if words[0] == "-m" and len(words) > 1:
        package, room, *rest = (*words[1].split("."), "", "")
        if package != "allstep":
            return ()
        return {room} & _FRAMEWORKS.keys() or (given if room == "commands" and rest[:1] != ["cli"] else ())
    if words[0] == "-c" and len(words) > 1:
        text = words[1].encode()
    elif words[0].startswith("-"):
        return ()
    else:
        try:
            with open(words[0], "rb") as file:
                text = file.read(1 << 16)
        except OSError:
            return ()
    import re

    imports = rb"^\s*(?:import (?:[\w.]+, )*|from )(%b)\b"
    found = {name for name, modules in _FRAMEWORKS.items() if re.search(imports % modules, text, re.M)}
    return found if len(found) == 1 else given if found or b"allstep" in text else ()


def _become_client(folder, framework, unbuffered, words):
    import fcntl
    import marshal
    import resource
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/{framework}")
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    open_files = []
    for number in sorted(numbers):
        try:
            flags = fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:  # listed the folder
            continue
        if not flags & fcntl.FD_CLOEXEC:
            open_files.append(number)
    mask = os.umask(0)
    os.umask(mask)
    request = {
        "prefix": sys.prefix,
        "variables": dict(os.environ),
        "words": words,
        "after_python": sys.orig_argv[1:],
        "unbuffered": unbuffered,
        "folder": os.getcwd(),
        "files": open_files,
        "cpus": sorted(os.sched_getaffinity(0)),
        "umask": mask,
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        "limits": {
            name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
        },
    }
    data = marshal.dumps(request)
    passed_on = signal.valid_signals() - {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGCHLD,
        signal.SIGPIPE,
        signal.SIGCONT,
    }
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], open_files)
    connection.sendall(data)
    answer = connection.recv(1)
    if answer != b"+":  # the server imported the framework under other circumstances
        connection.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return
    for number in passed_on:
        if number < 32 and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    answer = connection.recv(4)
    if not answer:
        os.write(2, b"The server of tests/warm has ended.\n")
        os._exit(70)
    status = int.from_bytes(answer, "little", signed=True)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _start():
    folder = os.environ.get("WARM_FOLDER")
    # A fork would find no module in other folders of PYTHONPATH, and run no sitecustomize.py there.
    is_alone = os.environ.get("PYTHONPATH") == os.path.dirname(__file__)
    found = folder and is_alone and _request()
    if found:
        _become_client(folder, *found)


_start()
