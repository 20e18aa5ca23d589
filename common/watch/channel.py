"""Messages between the threads that watch: JSON objects, one a line, over a connected socket."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading

# A message with the stacks of all threads of a rank is the longest.
_MAX_BYTES = 1 << 20
_SEND_SECONDS = 5.0


def line(message: dict) -> bytes:
    """A message as it travels."""
    return json.dumps(message).encode() + b"\n"


def knows_token(greeting: object, token: str) -> bool:
    """Whether a first message, which anybody may have sent, shows the token of the job."""
    quote = greeting.get("token") if isinstance(greeting, dict) else None
    return isinstance(quote, str) and hmac.compare_digest(quote.encode(), token.encode())


class Channel:
    """One end of a connection. Any thread may send; one thread receives, when `fileno` is readable."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(_SEND_SECONDS)
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message. That the other end is gone is found out by receiving, or by its silence."""
        self.send_line(line(message))

    def send_line(self, text: bytes) -> None:
        """Send a message that `line` has made, for who sends it to many."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(text)

    def receive(self) -> list[dict]:
        """The messages that have arrived.

        Raises:
            EOFError: the other end is gone.
        """
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MAX_BYTES:
            raise EOFError
        return [json.loads(line) for line in lines]

    def greeting(self) -> list[dict]:
        """The messages of one who has just connected, of whom nothing is known: [{}] where they are none."""
        try:
            return self.receive()
        except Exception:  # whatever a stranger may send
            return [{}]

    def close(self) -> None:
        self._connection.close()
