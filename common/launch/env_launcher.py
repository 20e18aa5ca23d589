"""Ranks without a launcher: a user or a scheduler sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each.

This is torch's env://, which Kubeflow's PyTorchJob and many scripts use. These variables do not tell which ranks share
a host, which the choice of a GPU depends on. So the ranks connect at MASTER_PORT and exchange their hosts.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

from allstep.common.base.errors import UserError, quote
from allstep.common.launch.placement import BY_HAND, MASTER, Placement
from allstep.common.launch.tcp_rendezvous import meet, wait
from allstep.common.launch.variables import read_address

_PATIENCE_SECONDS = 300.0  # as in torch's store, because users and pods do not start all ranks at once


@dataclass(frozen=True)
class Rank:
    """Description of a rank that it sends to the others."""

    host: str
    """Identifier of the host, the same on all its ranks and different on others."""
    name: str
    """Host name, for messages."""
    address: str
    """Address from which the host reaches rank 0; empty for rank 0."""
    master: str
    """Value of MASTER_ADDR."""
    local_rank: str
    """Value of LOCAL_RANK; empty if it is not set."""
    local_size: str
    """Value of LOCAL_WORLD_SIZE; empty if it is not set."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that all ranks must have alike."""


def locate(
    placement: Placement, flags: Callable[[], Mapping[str, str]], environ: Mapping[str, str] = os.environ
) -> Placement:
    """Find out which ranks share a host, in a job without a launcher; all its ranks call this together.

    It returns `placement` with its local rank, local size and hosts; if a launcher gave these, `placement` itself.
    `flags` returns the flags that all ranks must have alike. Raises UserError if LOCAL_RANK, LOCAL_WORLD_SIZE or flags
    are wrong, and as `common.launch.tcp_rendezvous.meet` does; Fault if a rank did not come within five minutes.
    """
    if placement.launcher != BY_HAND:
        return placement
    address = master_address(placement, environ)
    local_address = address_towards(address, _PATIENCE_SECONDS) if placement.rank else ""
    local_rank, local_size = (environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    own = Rank(_host(), socket.gethostname(), local_address, environ[MASTER[0]], local_rank, local_size, flags())
    texts = meet(json.dumps(astuple(own)), placement, address, topic="hosts", seconds=_PATIENCE_SECONDS)
    return located(placement, [Rank(*json.loads(text)) for text in texts])


def master_address(placement: Placement, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the rendezvous address of the ranks, for `common.launch.tcp_rendezvous.meet`."""
    host, port = read_address(*MASTER, environ, remedy="correct it")
    if placement.local_size == placement.world_size:
        return "127.0.0.1", port
    # The master of a PyTorchJob has localhost in MASTER_ADDR, and the other pods reach it by its name.
    is_loopback = host == "localhost" or host.startswith("127.")
    if placement.rank == 0 and (not is_loopback or "KUBERNETES_SERVICE_HOST" in environ):
        return "", port
    return host, port


def address_towards(address: tuple[str, int], seconds: float) -> str:
    """Return the address from which this host reaches another one, whose name may take `seconds` to become known.

    Raises Fault if the name is not known, or there is no route to it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
        except OSError as error:
            wait(deadline, f"a way to {address[0]}:{address[1]} ({error.strerror})")


def _host() -> str:
    """Identify a host: return its name, its kernel's boot, and its process and network namespaces."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([socket.gethostname(), kernel, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def located(placement: Placement, ranks: Sequence[Rank]) -> Placement:
    """Return `placement` completed by the descriptions of all ranks, in the order of ranks.

    Raises UserError if LOCAL_RANK or LOCAL_WORLD_SIZE contradict the descriptions, or flags each other.
    """
    check_same_flags([rank.flags for rank in ranks])
    own = ranks[placement.rank]
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    neighbours = [number for number, rank in enumerate(ranks) if rank.host == own.host]
    _check_local([ranks[number] for number in neighbours], f"rank {', '.join(map(str, neighbours))} on {own.name}")
    addresses = {rank.host: rank.address for rank in reversed(ranks)}
    addresses[hosts[0]] = next((rank.master for rank in ranks if rank.host != hosts[0]), "127.0.0.1")
    return replace(
        placement,
        local_rank=int(own.local_rank or neighbours.index(placement.rank)),
        local_size=len(neighbours),
        cross_rank=hosts.index(own.host),
        hosts=tuple(addresses[host] for host in hosts),
    )


def check_same_flags(flags: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks with different flags, which would wait for each other without end; one left out is none."""
    if difference := first_difference(flags):
        name, rank, first, other = difference
        raise UserError(
            f"expected the same flags on all ranks, received {name} {first} on rank 0 and {other} on rank {rank}; "
            "start all ranks by the same command"
        )


def first_difference(entries: Sequence[Mapping[str, str]]) -> tuple[str, int, str, str] | None:
    """Return the name of the first entry that is not the same on all ranks, a rank, and the values of rank 0 and it."""
    for rank, other in enumerate(entries):
        for name in {**entries[0], **other}:
            first, value = entries[0].get(name, "none"), other.get(name, "none")
            if value != first:
                return name, rank, quote(first), quote(value)
    return None


def _check_local(neighbours: Sequence[Rank], named: str) -> None:
    """Refuse wrong LOCAL_RANK or LOCAL_WORLD_SIZE on a host, because two ranks would take the same GPU."""
    num_ranks = len(neighbours)
    local_ranks = [rank.local_rank for rank in neighbours]
    if any(local_ranks) and set(local_ranks) != {str(number) for number in range(num_ranks)}:
        raise UserError(
            f"expected LOCAL_RANK to count from 0 to {num_ranks - 1} for {named}, received "
            f"{', '.join(text or 'nothing' for text in local_ranks)}; correct it, or unset it for all"
        )
    sizes = {rank.local_size for rank in neighbours}
    if not sizes <= {"", str(num_ranks)}:
        raise UserError(
            f"expected LOCAL_WORLD_SIZE to be {num_ranks} for {named}, received {' and '.join(sorted(sizes - {''}))}; "
            "correct it, or unset it for all"
        )
