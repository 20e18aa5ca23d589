"""Process that has imported modules, and forks a child for each Python command: a real process, without the imports.

    python fork_server.py SOCKET MODULE...

A request on the Unix socket is one JSON object, with the descriptors of standard output and error; the answers are the
child's process id, and then its exit status as `subprocess` has it, each on a line.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys

from allstep.common.process.lean_import import lean_import


def serve(listener: socket.socket) -> dict:
    """Fork a child for each request; return the request in the child."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 2)
                if not message:  # the tests have ended
                    sys.exit()
                child = os.fork()
                if not child:
                    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
                        os.dup2(descriptor, standard)
                    selector.close()
                    os.closerange(3, max(*descriptors, connection.fileno(), listener.fileno()) + 1)
                    return json.loads(message)
                for descriptor in descriptors:
                    os.close(descriptor)
                connection.sendall(f"{child}\n".encode())
                selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
            else:
                child, connection = key.data
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                connection.sendall(f"{status}\n".encode())
                connection.close()


def become(request: dict) -> None:
    """Run a command as a new interpreter would, in its folder and environment."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    first, *others = request["words"]
    sys.orig_argv = [sys.executable, *request["words"]]
    if first == "-m":
        sys.path[0] = request["folder"]
        sys.argv = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        sys.argv = [first, *others]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    path, *modules = sys.argv[1:]
    # `serve` forks; in the children nothing of this program is left but the modules.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        with lean_import():
            for module in modules:
                importlib.import_module(module)
        become(serve(server))
