"""Where ranks connect to whoever hears them: of those that do, only who knows the job's token is let in."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable

from allstep.common.watch.channel import Channel, knows_token

Admit = Callable[[Channel, dict, list[dict]], bool]
"""Takes a connection, its greeting and what came with it; returns whether it was that of a rank who was not there."""


class Entrance:
    """A listener, and those who have connected and not been let in yet; its owner's loop waits for both."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector, token: str, admit: Admit) -> None:
        self._listener, self._selector, self._token, self._admit = listener, selector, token, admit
        self._strangers: list[Channel] = []
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def sources(self) -> list[socket.socket | Channel]:
        """All that has to be closed when nobody else is let in."""
        return [self._listener, *self._strangers]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel = Channel(connection)
        self._strangers.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._greet(channel))

    def _greet(self, channel: Channel) -> None:
        """Let a rank in that knows the token; anybody else may connect, so nothing is taken for granted."""
        messages = channel.greeting()
        known = not messages or knows_token(messages[0], self._token)
        if known and not messages:
            return  # the rest of the line is still to come
        self._strangers.remove(channel)
        self._selector.unregister(channel)
        if not known or not self._admit(channel, messages[0], messages[1:]):
            channel.close()
