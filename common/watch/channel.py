"""Connections of the watchdog threads: messages, JSON objects, one per line; the listener for them; and their clock."""

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

# The longest message has the stacks of all threads of a rank.
_MAX_BYTES = 1 << 20
_SEND_SECONDS = 5.0
BEAT_SECONDS = 1.0
"""Seconds between heartbeats, and the longest that a thread waits for messages."""


class Clock:
    """Seconds in which a thread has run: after the suspension of the whole job, no rank takes the others for lost."""

    def __init__(self) -> None:
        self._seconds, self._looked_at = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the seconds so far, of which the last turn of the thread's loop adds at most those of a beat."""
        looked_at = time.monotonic()
        self._seconds += min(looked_at - self._looked_at, BEAT_SECONDS)
        self._looked_at = looked_at
        return self._seconds


def line(message: dict[str, Any]) -> bytes:
    """Encode a message."""
    return json.dumps(message).encode() + b"\n"


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


Admit = Callable[[Channel, dict, list[dict]], bool]
"""Function that takes a connection, its greeting and further messages, and returns whether its rank is a new one."""


class Entrance:
    """Listening socket and the connections not admitted yet; the event loop of its owner waits for both."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, token: str, admit: Admit) -> None:
        self._listener, self._selector, self._token, self._admit = listener, selector, token, admit
        self._strangers: list[Channel] = []
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def sources(self) -> list[socket.socket | Channel]:
        """Sockets to close when no more ranks are admitted."""
        return [self._listener, *self._strangers]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel = Channel(connection)
        self._strangers.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._greet(channel))

    def _greet(self, channel: Channel) -> None:
        """Admit a rank that knows the token; other processes may connect as well, so all input is untrusted."""
        if not (messages := channel.greeting()):
            return  # the line is still incomplete
        token = messages[0].get("token") if isinstance(messages[0], dict) else None
        known = isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode())
        self._strangers.remove(channel)
        self._selector.unregister(channel)
        if not known or not self._admit(channel, messages[0], messages[1:]):
            channel.close()
