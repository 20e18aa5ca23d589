"""Listener for connections of ranks, which admits only those that know the job's token."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from allstep.common.watch.channel import Channel, knows_token

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
        messages = channel.greeting()
        known = not messages or knows_token(messages[0], self._token)
        if known and not messages:
            return  # the line is still incomplete
        self._strangers.remove(channel)
        self._selector.unregister(channel)
        if not known or not self._admit(channel, messages[0], messages[1:]):
            channel.close()
