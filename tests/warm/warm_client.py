"""Let a new Python process be a fork of one that has imported a framework, which takes most of a short run.

A process that is about to run a program of PyTorch's or TensorFlow's asks a server of `warm_server.py` for a fork that
runs it with the same words, folder, variables and open files, passes signals on to it, and ends as it ends. All others
go on as they are: those whose program or start is not among the few that are known, that have a terminal, or whose
`circumstances` are not the server's. A fork differs by its parent and its process group, by what /proc shows of its
start, by what an import prints, and by modules that its program does not import. At its end it clears what the program
has made, but not what the server has imported, which would take longer than most programs.
"""

import os
import sys

_FRAMEWORKS = {
    "pytorch": rb"torch|horovod\.torch|allstep\.pytorch",
    "tensorflow": rb"tensorflow|keras|horovod\.tensorflow|allstep\.tensorflow",
}
NUM_SERVERS = 2
"""Servers of a framework; neighbouring ranks have different ones, as their strings must have different hashes."""
_LATER = (
    *("ALLSTEP_", "HOROVOD_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "TORCHINDUCTOR_", "TORCH_NCCL_", "PYTEST_"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_"),
    *(
        "TF_CONFIG",
        "NUMPY_MADVISE_HUGEPAGE",
        "NCCL_SOCKET_IFNAME",
        "OPAL_PREFIX",
        "IPATH_NO_BACKTRACE",
        "HFI_NO_BACKTRACE",
    ),
    *("WARM_FOLDER", "PYTHONPATH", "PYTHONUNBUFFERED", "AWS_SECRET_ACCESS_KEY"),
    *("SSH_", "SHELL", "MAIL", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "CUDA_VISIBLE_DEVICES"),
    *("SLURMD_NODENAME", "ENVIRONMENT"),  # set by Slurm
    *("PATH", "PWD", "OLDPWD", "SHLVL", "PS1", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "COLUMNS", "LINES"),
    *("ENABLE_RUNTIME_UPTIME_TELEMETRY", "TF2_BEHAVIOR", "TPU_ML_", "HDF5_PLUGIN_PATH"),  # set by imports
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
"""Beginnings of the names of variables that programs read when they run, not while they import a framework."""
TRAINERS = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
"""Variables as trainers set them before they import a framework."""
_LOADING = {"evaluate", "export", "difficulty"}
"""Commands of allstep that load a framework in their process; others start trainers."""
_STATUS = ("Uid:", "Gid:", "CapEff:", "NoNewPrivs:", "Seccomp:")
_TAKEN_OVER = ("RLIMIT_NOFILE", "RLIMIT_OFILE", "RLIMIT_CORE")
_MAX_FILES = 250
ENTERED = {"ipc": 0x08000000, "mnt": 0x00020000, "net": 0x40000000, "pid": 0x20000000, "uts": 0x04000000}
"""Kinds of namespaces into which a fork follows its client, and their flags in <sched.h>."""
_EMPTY_HOME = "/run/bed/home"
"""Home folder of root on simulated hosts (`tests/cluster/two_hosts.sh`), where frameworks find no settings."""


def start():
    """Become a client, or import the next module of the name `sitecustomize`, which this folder's one shadows."""
    folder = os.environ.get("WARM_FOLDER")
    if folder and (found := _program()):
        _become_client(folder, *found)
    import_next_sitecustomize()


def import_next_sitecustomize():
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    if spec := PathFinder.find_spec("sitecustomize"):
        spec.loader.exec_module(module_from_spec(spec))


def circumstances():
    """Return what a fork cannot take over from its client, so that it must be the same for client and server."""
    import resource

    later = tuple(name for name in _LATER if name.endswith("_"))
    variables = {
        name: value for name, value in os.environ.items() if name not in (*_LATER, "_") and not name.startswith(later)
    }
    with open("/proc/self/status") as file:
        status = [line for line in file if line.startswith(_STATUS)]
    with open("/proc/self/cgroup") as group, open("/proc/self/oom_score_adj") as score:
        status += [*group, *score]
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_") and name not in _TAKEN_OVER]
    if variables.get("HOME") == _EMPTY_HOME:
        variables["HOME"] = "/root"
    return {
        **TRAINERS,
        **variables,
        "prefix": sys.prefix,
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "limits": [resource.getrlimit(getattr(resource, name)) for name in limits],
        "status": status,
        "root": os.readlink("/proc/self/root"),
        "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("cgroup", "user")],
    }


def _program():
    """Return the framework of the program that this process runs, and the program, or None if it starts anew."""
    words = sys.orig_argv[1:]
    words = words[words[:1] == ["-u"] :]
    found = _frameworks(words) if words else ()
    first, *others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_known = first == os.path.dirname(__file__) and all(map(os.path.isabs, others))
    return (*found, words, others) if len(found) == 1 and is_known else None


def _frameworks(words):
    """Return the frameworks that a program names or imports; its arguments decide about one that imports both."""
    given = {word.rpartition("-")[2] for word in words[1:]} & _FRAMEWORKS.keys()
    if words[0] == "-m" and len(words) > 1:
        package, room, *_ = (*words[1].split("."), "")
        if package != "allstep":
            return ()
        if words[1] == "allstep.commands.cli":
            return _of_command(words[2:], given)
        return {room} & _FRAMEWORKS.keys() or (given if room == "commands" else ())
    if words[0] == "-c" and len(words) > 1:
        text = words[1].encode()
    elif words[0].startswith("-"):
        return ()
    elif os.path.basename(words[0]) == "allstep":
        return _of_command(words[1:], given)
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


def _of_command(words, given):
    """Return the framework that a command loads: the one that its flags name, or that of its run, or the default."""
    if not _LOADING & set(words[:1]):
        return ()
    try:
        with open(f"{words[1]}/metrics.jsonl", "rb") as file:
            text = file.read(1 << 16)
    except (OSError, IndexError):
        text = b""
    return given or {name for name in _FRAMEWORKS if b'"framework": "%b"' % name.encode() in text} or {"pytorch"}


def _open_files():
    """Return the files that a new program of this process would have."""
    import fcntl

    files = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            if not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                files.append(number)
        except OSError:  # listed the folder
            continue
    return files


def _has_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


def _become_client(folder, framework, words, others):
    """Have a fork run the program, and end as it ends; return if the server refuses."""
    files = _open_files()
    if files[:3] != [0, 1, 2] or len(files) > _MAX_FILES or _has_terminal():
        return
    import marshal
    import resource
    import signal
    import socket

    mask = os.umask(0)
    os.umask(mask)
    request = {
        "circumstances": circumstances(),
        "variables": dict(os.environ),
        "words": words,
        "others": others,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "unbuffered": "-u" in sys.orig_argv[1:2] or bool(os.environ.get("PYTHONUNBUFFERED")),
        "folder": os.getcwd(),
        "files": files,
        "cpus": sorted(os.sched_getaffinity(0)),
        "umask": mask,
        "groups": os.getgroups(),
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in _TAKEN_OVER},
    }
    data = marshal.dumps(request)
    ranks = [os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "RANK") if name in os.environ]
    number = int(ranks[0][-1]) % NUM_SERVERS if ranks and ranks[0].isdecimal() else 0
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/{framework}{number}")
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGCONT}
    passed_on = {number for number in signal.valid_signals() - kept if number < signal.SIGRTMIN}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], files)
    connection.sendall(data)
    if connection.recv(1) != b"+":
        connection.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:  # which the fork may close before it ends
        os.dup2(null, file) if file < 3 else os.close(file)
    for number in passed_on:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    status = int.from_bytes(connection.recv(4) or (70).to_bytes(4, "little"), "little", signed=True)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
