"""Relay for jobs of many ranks: one connection per host carries the messages of all its ranks to rank 0.

The relay is a thread in the first rank of each host except rank 0's. It combines the heartbeats of a second into one
message, and passes everything else on at once. Messages of rank 0 go to all ranks of the host.
"""

import selectors
import socket
import time
import zlib

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.resources import host_name
from allstep.common.launch.placement import Placement
from allstep.common.watch.channel import BEAT_SECONDS, Channel, Entrance

# For fewer ranks, one connection per rank costs rank 0 less than 1 % of a core (docs/scale.md).
RELAYED_FROM = 128


def meet(collectives: Collectives, placement: Placement) -> tuple[int, socket.socket | None]:
    """Return the loopback port of this host's relay, or 0 without one, and on the relay's rank its listening socket."""
    listener = (
        socket.create_server(("127.0.0.1", 0), backlog=placement.local_size) if placement.local_rank == 0 else None
    )
    port = listener.getsockname()[1] if listener else 0
    host = zlib.crc32(host_name().encode())
    hosts = collectives.all_gather(np.array([host, port], np.int64))
    ports = [int(port) for found, port in hosts if found == host and port]
    if host == hosts[0][0] or len(ports) != 1:  # rank 0's own host, or several hosts of the same name
        if listener:
            listener.close()
        return 0, None
    return ports[0], listener


class Relay:
    """Relay of a host, which runs in a thread of its first rank until that rank or rank 0 is done."""

    def __init__(self, rank: int, own: Channel, upstream: Channel, listener: socket.socket, token: str) -> None:
        """Start with two connections: `own` to the agent of this rank, `upstream` to the monitor."""
        self._rank, self._own, self._upstream = rank, own, upstream
        self._channels: dict[int, Channel] = {}
        self._beats: dict[int, dict] = {}
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._entrance = Entrance(listener, self._selector, token, self._let_in)
        self._selector.register(upstream, selectors.EVENT_READ, self._pass_down)
        self._admit(rank, own)

    def run(self) -> None:
        """Pass on messages until this rank's agent or the monitor closes its connection."""
        next_beat = time.monotonic() + BEAT_SECONDS
        while not self._is_over:
            for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                if key.fd in self._selector.get_map():  # a callback before may have closed it
                    key.data()
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._upstream.send(relayed=list(self._beats.items()))
                self._beats.clear()
        for source in (*self._entrance.sources, self._upstream, *self._channels.values()):
            source.close()

    def send_farewell(self, status: int) -> None:
        """Notify rank 0 that this rank exits and has reported the reason."""
        self._upstream.send(relayed=[(self._rank, {"bye": status})])

    def _let_in(self, channel: Channel, greeting: dict, others: list[dict]) -> bool:
        if greeting["rank"] in self._channels:
            return False
        self._upstream.send(joined=greeting["rank"], host=greeting["host"])
        self._admit(greeting["rank"], channel)
        for message in others:
            self._pass_up(greeting["rank"], message)
        return True

    def _admit(self, rank: int, channel: Channel) -> None:
        self._channels[rank] = channel
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._receive(rank))

    def _receive(self, rank: int) -> None:
        channel = self._channels[rank]
        try:
            messages = channel.receive()
        except EOFError:
            self._selector.unregister(channel)
            channel.close()
            del self._channels[rank]
            self._is_over |= rank == self._rank
            messages = [{"gone": True}]
        for message in messages:
            self._pass_up(rank, message)

    def _pass_up(self, rank: int, message: dict) -> None:
        if "moves" in message:
            self._beats[rank] = message
        else:
            self._upstream.send(relayed=[(rank, message)])

    def _pass_down(self) -> None:
        try:
            messages = self._upstream.receive()
        except EOFError:
            self._is_over = True
            return
        for message in messages:
            for channel in self._channels.values():
                channel.send(**message)
