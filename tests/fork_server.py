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
from functools import partial

from allstep.common.process.lean_import import lean_import


def serve(listener: socket.socket) -> dict:
    """Fork a child for each request, until standard input ends; return the request in the child."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, accept)
    selector.register(sys.stdin, selectors.EVENT_READ, end)
    while True:
        for key, _ in selector.select():
            if request := key.data(selector, key.fileobj):
                for one in selector.get_map().values():
                    if one.fd:
                        os.close(one.fd)
                return request


def end(selector: selectors.BaseSelector, stdin: object) -> None:
    sys.exit()


def accept(selector: selectors.BaseSelector, listener: socket.socket) -> dict | None:
    """Fork a child for the request of a new connection; return the request in the child."""
    connection, _ = listener.accept()
    begin, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    message = begin + b"".join(iter(lambda: connection.recv(2**16), b""))
    child = os.fork()
    if not child:
        for descriptor, standard in zip(descriptors, (1, 2), strict=True):
            os.dup2(descriptor, standard)
        connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    if not child:
        return json.loads(message)
    connection.sendall(f"{child}\n".encode())
    selector.register(os.pidfd_open(child), selectors.EVENT_READ, partial(answer, child, connection))
    return None


def answer(child: int, connection: socket.socket, selector: selectors.BaseSelector, ended: int) -> None:
    """Send the exit status of a child that has ended."""
    selector.unregister(ended)
    os.close(ended)
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
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
