"""Stand-in for `python WORDS`, as a launcher starts it: a child of the fork server is the rank.

    python -I -S fork_client.py SOCKET WORDS...

It passes on signals and the exit status. Where it is killed, the server kills the child.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def request(path: str, words: list[str], *, folder: str, environ: dict[str, str], outputs: list[int]) -> socket.socket:
    """Connect to the server and have it run `python WORDS`; return the connection, on which the answers come."""
    parts = [folder, *(f"{name}={value}" for name, value in environ.items()), "", *words]
    message = "\0".join(parts).encode(errors="surrogateescape")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], outputs)
        connection.sendall(message)
    except OSError:
        connection.close()
        raise
    return connection


def main() -> None:
    path, *words = sys.argv[1:]
    signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the child is there
    connection = request(path, words, folder=os.getcwd(), environ=dict(os.environ), outputs=[1, 2])
    answers = connection.makefile()
    child = int(answers.readline())

    def pass_on(number: int, _frame: object) -> None:
        os.kill(child, number)

    for number in signals:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
