"""Watchdog of a run: a fault of any rank ends the job on all ranks, and is reported once.

Every rank has a thread (`agent`) that sends a heartbeat with the rank's progress to a thread in rank 0 (`monitor`) once
a second. So rank 0 detects lost and stuck ranks. Notices to stop (SIGTERM, SIGUSR1, ...) use the same connections.
"""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import RanksLost
from allstep.common.base.resources import host_name
from allstep.common.launch import rendezvous
from allstep.common.launch.placement import Placement
from allstep.common.process import exit
from allstep.common.watch.agent import HOSTS_CHANGED, NOTICES, Agent
from allstep.common.watch.channel import Channel
from allstep.common.watch.monitor import Limits, Monitor
from allstep.common.watch.progress_state import ProgressState
from allstep.common.watch.relay import RELAYED_FROM, Relay, meet

__all__ = ["HOSTS_CHANGED", "NOTICES", "Limits", "ProgressState", "watching"]

_ADDRESS_BYTES = 512
_MAX_ADDRESSES = 10


@contextlib.contextmanager
def watching(
    collectives: Collectives | None,
    placement: Placement,
    progress_state: ProgressState,
    limits: Limits,
    tensors: Callable[[], Sequence[str]] = list,
    *,
    sever: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[str], None]]:
    """Watch the run while the block runs; all ranks enter it together.

    The block gets a function that makes all ranks stop at the same point; its argument is the notice to report. Raises
    RanksLost if rank 0 cannot be reached, or ranks of an elastic job were lost without the block noticing.

    Args:
        collectives: collectives of all ranks of `placement`; None to watch this rank by itself.
        tensors: returns the names of the tensors that this rank waits for, if the strategy knows them.
        sever: closes the connections of an elastic job, so that the training loop notices that ranks are lost.
    """
    world_size = placement.world_size if collectives else 1
    monitor, relay, first_host = None, None, host_name()
    if placement.rank == 0 or world_size == 1:
        local_end, monitors_end = map(Channel, socket.socketpair())
        monitor = Monitor(world_size, monitors_end, progress_state, limits)
    if collectives and world_size > 1:
        first_host, address = _agree_on_address(collectives, placement, monitor)
        port, listener = meet(collectives, placement) if world_size >= RELAYED_FROM else (0, None)
    if monitor:
        channel = local_end
    else:
        channel, relay = _reach(placement, address, limits.silence / 2, port, listener)
    agent = Agent(placement, channel, progress_state, limits, tensors, first_host=first_host, sever=sever)
    restore_signals = agent.catch_signals()
    exit.before_leaving((monitor or relay or agent).send_farewell)
    parts = [one for one in (monitor, relay, agent) if one]
    threads = [threading.Thread(target=one.run, name=exit.WATCH, daemon=True) for one in parts]
    for thread in threads:
        thread.start()
    try:
        agent.wait_for_all()
        yield agent.ask_to_stop
    except BaseException:
        if world_size == 1:
            agent.finish()  # a notebook that catches the error goes on without this watch
        elif limits.elastic:
            agent.abandon()
        else:
            raise  # the process is about to exit, and watches the others until then
        _end(threads, restore_signals)
        raise
    agent.finish()
    _end(threads, restore_signals)
    agent.check_whole()


def _end(threads: Sequence[threading.Thread], restore_signals: Callable[[], None]) -> None:
    for thread in threads:
        thread.join()
    exit.before_leaving(None)
    restore_signals()


def _agree_on_address(collectives: Collectives, placement: Placement, monitor: Monitor | None) -> tuple[str, str]:
    """Listen on rank 0, and return to all ranks its host name, and its addresses with port and token."""
    text = b""
    if monitor:
        host = rendezvous.local_host(placement)
        on_one_host = placement.local_size == placement.world_size
        # Other hosts may be unable to resolve this host's name, and may reach only one of its addresses.
        hosts = [host] if on_one_host else [host, *_local_addresses()]
        listener = socket.create_server((host if on_one_host else "", 0), backlog=placement.world_size)
        token = secrets.token_hex(16)
        monitor.listen(listener, token)
        text = f"{host_name()} {','.join(hosts)} {listener.getsockname()[1]} {token}".encode()
    address = np.zeros(_ADDRESS_BYTES, np.uint8)
    address[: len(text)] = np.frombuffer(text, np.uint8)
    monitor_at = collectives.broadcast_arrays({"watch": address})["watch"].tobytes().rstrip(b"\0").decode()
    first_host, _, address = monitor_at.partition(" ")
    return first_host, address


def _reach(
    placement: Placement, address: str, seconds: float, port: int, listener: socket.socket | None
) -> tuple[Channel, Relay | None]:
    """Return the channel of this rank's agent, and the relay if this rank runs it; `relay.meet` explains `port`."""
    token = address.split()[2]
    if listener:
        local_end, relays_end = map(Channel, socket.socketpair())
        upstream = _connect(placement, address, seconds)
        return local_end, Relay(placement.rank, relays_end, upstream, listener, token)
    if port:
        address = f"127.0.0.1 {port} {token}"
    return _connect(placement, address, seconds), None


def _connect(placement: Placement, address: str, seconds: float) -> Channel:
    """Connect to rank 0 at one of its addresses; trying all of them takes at most `seconds`."""
    names, port, token = address.split()
    hosts = names.split(",")
    errors = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, int(port)), timeout=seconds / len(hosts))
        except OSError as error:
            errors.append(f"{host}:{port} ({error})")
            continue
        channel = Channel(connection)
        channel.send(rank=placement.rank, host=host_name(), token=token)
        return channel
    raise RanksLost(
        f"rank 0 cannot be reached at {', '.join(errors)}; the hosts of a job must reach each other at any port"
    )


def _local_addresses() -> list[str]:
    """Return this host's IPv4 addresses except loopback, at most as many as fit into the message."""
    import psutil

    found = [one.address for of in psutil.net_if_addrs().values() for one in of if one.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")][:_MAX_ADDRESSES]
