"""Process that has imported modules, and forks a child for each Python command: a real process, without the imports.

    python fork_server.py SOCKET MODULE...

`fork_client.request` says what to run, and sends the descriptors of standard output and error; the answers are the
child's process id, and then its exit status as `subprocess` has it, each on a line. A child whose client hangs up is
killed. The server ends with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
from functools import partial

from allstep.common.process.lean_import import lean_import


def serve(listener: socket.socket) -> list[str]:
    """Fork a child for each request; return the parts of the request in the child."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, accept)
    selector.register(sys.stdin, selectors.EVENT_READ, lambda *_: sys.exit())
    while True:
        for key, _ in selector.select():
            if request := key.data(selector, key.fileobj):
                for one in selector.get_map().values():
                    if isinstance(one.fileobj, int):
                        os.close(one.fileobj)
                    elif one.fd:  # standard input stays
                        one.fileobj.close()
                selector.close()
                return request


def accept(selector: selectors.BaseSelector, listener: socket.socket) -> list[str] | None:
    """Fork a child for the request of a new connection; return its parts in the child."""
    connection, _ = listener.accept()
    size, descriptors, _, _ = socket.recv_fds(connection, 8, 2)
    message = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    child = os.fork()
    if not child:
        for descriptor, standard in zip(descriptors, (1, 2), strict=True):
            os.dup2(descriptor, standard)
        connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    if not child:
        return message.decode(errors="surrogateescape").split("\0")
    connection.sendall(f"{child}\n".encode())
    selector.register(connection, selectors.EVENT_READ, partial(kill, child))
    selector.register(os.pidfd_open(child), selectors.EVENT_READ, partial(answer, child, connection))
    return None


def kill(child: int, selector: selectors.BaseSelector, connection: socket.socket) -> None:
    """Kill the child of a client that has hung up."""
    selector.unregister(connection)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def answer(child: int, connection: socket.socket, selector: selectors.BaseSelector, ended: int) -> None:
    """Send the exit status of a child that has ended."""
    selector.unregister(ended)
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(KeyError):
        selector.unregister(connection)
    with contextlib.suppress(OSError):  # the client has hung up
        connection.sendall(f"{status}\n".encode())
    connection.close()


def become(request: list[str]) -> None:
    """Run a command as a new interpreter would, in its folder and environment."""
    end = request.index("")
    (folder, *environ), words = request[:end], request[end + 1 :]
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(dict(one.split("=", 1) for one in environ))
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.path[0], sys.argv = folder, words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(words[0])), words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    path, *modules = sys.argv[1:]
    # `serve` forks; in the children nothing of this program is left but the modules.
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        os.rename(f"{path}.new", path)
        with lean_import():
            for module in modules:
                importlib.import_module(module)
        become(serve(server))
