"""Messages between watchdog threads: JSON objects, one per line, over a connected socket."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
from typing import Any

# The longest message has the stacks of all threads of a rank.
_MAX_BYTES = 1 << 20
_SEND_SECONDS = 5.0


def line(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    return json.dumps(message).encode() + b"\n"


def knows_token(greeting: object, token: str) -> bool:
    """Return whether the first message of a connection, which may come from any process, has the job's token."""
    quote = greeting.get("token") if isinstance(greeting, dict) else None
    return isinstance(quote, str) and hmac.compare_digest(quote.encode(), token.encode())


class Channel:
    """End of a connection. Any thread may send; only one thread receives, when `fileno` is readable."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(_SEND_SECONDS)
        self._lock = threading.Lock()
        self._rest = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, **message: object) -> None:
        """Send a message. Errors are ignored, since the receiver detects a lost connection, or missing heartbeats."""
        self.send_line(line(message))

    def send_line(self, text: bytes) -> None:
        """Send a message encoded by `line`, for senders that have many receivers."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(text)

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived.

        Raises EOFError if the connection is closed, or a message is too long.
        """
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _MAX_BYTES:
            raise EOFError
        return [json.loads(line) for line in lines]

    def greeting(self) -> list[dict[str, Any]]:
        """Return the messages of a new, untrusted connection, or [{}] if they are invalid."""
        try:
            return self.receive()
        except Exception:  # an untrusted process may send anything
            return [{}]

    def close(self) -> None:
        self._connection.close()
