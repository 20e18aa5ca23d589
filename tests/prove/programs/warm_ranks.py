"""Start the ranks of a script as forks of a process that has imported the frameworks, which takes most of a short run.

warm_ranks.py serve SOCKET MODULE...             imports the modules, and forks the ranks that clients ask for
warm_ranks.py SOCKET LAUNCHER RANKS SCRIPT ...   is such a client, in place of a launcher; prints what ranks print
"""

import atexit
import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time

_GRACE_SECONDS = 5.0
"""Time that the other ranks have to end once one has failed, as under a launcher."""


def ask(path: str, launcher: str, num_ranks: str, *words: str) -> int:
    """Have the server run a script with this process's folder, variables and output; return its exit status."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = [launcher, int(num_ranks), words, os.getcwd(), dict(os.environ)]
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [1, 2])
        return int(connection.makefile().readline())


def serve(path: str, modules: list[str]) -> None:
    """Serve clients, each in a fork, until this process is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for module in modules:
        __import__(module)
    if "tensorflow" in modules:
        from tensorflow.python.autograph.core import config

        # Converting functions of these, which have no control flow of Python, takes most of a run.
        others = map(config.DoNotConvert, ("horovod", "allstep.tensorflow"))
        config.CONVERSION_RULES = (*others, *config.CONVERSION_RULES)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            connection, _ = server.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _serve(connection)
                os._exit(0)
            connection.close()


def _serve(connection) -> None:
    data, fds, *_ = socket.recv_fds(connection, 1 << 20, 2)
    while not data.endswith(b"\n"):
        data += connection.recv(1 << 20)
    _run(connection, fds, *json.loads(data))


def _run(connection, fds, launcher, num_ranks, words, folder, variables) -> None:
    store, store_variables = _store(launcher, num_ranks)
    ranks = {}
    for rank in range(num_ranks):
        own = {
            **variables,
            **{name: value.format(rank=rank, size=num_ranks) for name, value in store_variables.items()},
        }
        if not (pid := os.fork()):
            _become_rank(fds, own, folder, words)
        ranks[pid] = rank
    status, deadline = 0, None
    while ranks:
        has_left = select.select([connection], [], [], 0.02)[0]
        if has_left or (deadline and time.monotonic() > deadline):
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        for pid in list(ranks):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                del ranks[pid]
                status = status or os.waitstatus_to_exitcode(code)
                deadline = deadline or (status and time.monotonic() + _GRACE_SECONDS)
    if store:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
    with contextlib.suppress(BrokenPipeError):  # the client has been killed
        connection.sendall(f"{abs(status)}\n".encode())


def _store(launcher, num_ranks):
    """Return the process of a store at which ranks meet, or None, and the variables by which they find it."""
    if launcher == "torchrun":
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        names = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "{size}", "LOCAL_WORLD_SIZE": "{size}"}
        return None, {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if not launcher.startswith("horovodrun"):
        return None, {}
    os.environ["HOROVOD_JOB_KEY"] = key = os.urandom(32).hex()  # which signs what ranks tell the store
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        port = server.start()
        server.init(get_host_assignments(parse_hosts(f"localhost:{num_ranks}"), num_ranks))
        os.write(theirs, str(port).encode())
        signal.pause()
    port = os.read(ours, 16).decode()
    os.close(ours)
    os.close(theirs)
    names = {"RANK": "{rank}", "SIZE": "{size}", "LOCAL_RANK": "{rank}", "LOCAL_SIZE": "{size}", "CROSS_RANK": "0"}
    names |= {"CROSS_SIZE": "1", "HOSTNAME": "localhost", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    names |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo", "JOB_KEY": key}
    return pid, {f"HOROVOD_{name}": value for name, value in names.items()}


def _become_rank(fds, variables, folder, words) -> None:
    """Run the script in this process as in a new one, and exit."""
    for fd, stream in zip(fds, (1, 2), strict=True):
        os.dup2(fd, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:], sys.orig_argv[:] = words, [sys.executable, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    for module in ("random", "numpy.random", "torch"):  # forks have the random states of their parent
        if module in sys.modules:
            getattr(sys.modules[module], "seed")()  # noqa: B009
    status = 0
    try:
        from allstep.commands.prove.observer.start import start

        start()
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(ask(*sys.argv[1:]))
