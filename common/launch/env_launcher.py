"""Ranks without a launcher: a user or a scheduler sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each.

This is torch's env://, which Kubeflow's PyTorchJob and many scripts use. These variables do not tell which ranks share
a host, which the choice of a GPU depends on. So the ranks connect at MASTER_PORT and exchange their hosts, by `meet`,
the TCP rendezvous that other launchers' ranks use as well: all connect to a known port of rank 0, and exchange a line
of text. Any process may connect there; connections that do not identify as a rank, or send too much, are ignored.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from allstep.common.base.errors import Fault, UserError, quote, quoted
from allstep.common.launch.placement import BY_HAND, MASTER, Placement
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


def locate(placement: Placement, flags: Callable[[], Mapping[str, str]]) -> Placement:
    """Find out which ranks share a host, in a job without a launcher; all its ranks call this together.

    It returns `placement` with its local rank, local size and hosts; if a launcher gave these, `placement` itself.
    `flags` returns the flags that all ranks must have alike. Raises UserError if LOCAL_RANK, LOCAL_WORLD_SIZE or flags
    are wrong, and as `meet` does; Fault if a rank did not come within five minutes.
    """
    if placement.launcher != BY_HAND:
        return placement
    address = master_address(placement, os.environ)
    local_address = address_towards(address, _PATIENCE_SECONDS) if placement.rank else ""
    local_rank, local_size = (os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    own = Rank(_host(), socket.gethostname(), local_address, os.environ[MASTER[0]], local_rank, local_size, flags())
    texts = meet(json.dumps(astuple(own)), placement, address, topic="hosts", seconds=_PATIENCE_SECONDS)
    return located(placement, [Rank(*json.loads(text)) for text in texts])


def master_address(placement: Placement, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the rendezvous address of the ranks, for `meet`."""
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
    """Refuse ranks with different flags, which would wait for each other without end; a missing flag counts as none."""
    if difference := first_difference(flags):
        name, rank, first, other = difference
        raise UserError(
            f"expected the same flags on all ranks, received {name} {first} on rank 0 and {other} on rank {rank}; "
            "start all ranks by the same command"
        )


def first_difference(entries: Sequence[Mapping[str, str]]) -> tuple[str, int, str, str] | None:
    """Return the first difference between rank 0 and another rank: entry, rank, and the values of rank 0 and of it."""
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


_POLL_SECONDS = 0.05
# A rank sends a short line at once. These limits stop other processes, which may send nothing or too much.
_LINE_SECONDS = 2.0
_MAX_CHARACTERS = 2**16


def meet(text: str, placement: Placement, address: tuple[str, int], *, topic: str, seconds: float) -> list[str]:
    """Return the texts of all ranks, in the order of ranks. The address may be reused for another topic.

    Raises UserError if rank 0 cannot listen there, or another process claims this rank, or another number of ranks;
    Fault if a rank did not come in time.

    Args:
        address: address of rank 0, as seen from this rank; on rank 0, an empty host means all its addresses.
        seconds: maximum time between the arrival of the first and of the last rank.
    """
    deadline = time.monotonic() + seconds
    if placement.rank == 0:
        return _collect(text, placement, address, topic, deadline)
    introduction = json.dumps([topic, placement.world_size, placement.rank, text])
    while True:
        # Rank 0 may not listen yet, or another process may listen there.
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            answer = json.loads(_ask(introduction, address, deadline, placement.world_size * _MAX_CHARACTERS))
            if isinstance(answer, str):
                raise UserError(answer if answer.isprintable() else quoted(answer))
            if len(answer) == placement.world_size and all(isinstance(said, str) for said in answer):
                return answer
        wait(deadline, f"rank 0 at {address[0]}:{address[1]}")


def wait(deadline: float, whom: str) -> None:
    """Sleep for a polling interval.

    Raises Fault, in which `whom` names what was waited for, if the deadline, in seconds of `time.monotonic`, has
    passed.
    """
    if time.monotonic() > deadline:
        raise Fault(f"{whom} did not come in time")
    time.sleep(_POLL_SECONDS)


def _ask(introduction: str, address: tuple[str, int], deadline: float, max_characters: int) -> str:
    left = max(_POLL_SECONDS, deadline - time.monotonic())
    with socket.create_connection(address, timeout=left) as connection, connection.makefile("rw") as stream:
        _say(introduction, stream)
        return stream.readline(max_characters)


def _collect(text: str, placement: Placement, address: tuple[str, int], topic: str, deadline: float) -> list[str]:
    texts = {0: text}
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(socket.create_server(address, backlog=placement.world_size))
        except OSError as error:
            assert error.errno is not None  # an error of the operating system
            reason = os.strerror(error.errno)  # without the address, which Python adds
            raise UserError(
                f"expected a port at which rank 0 can listen, received {address[1]} ({reason}); give another, or end "
                "what has it"
            ) from None
        streams = []
        while len(texts) < placement.world_size:
            server.settimeout(max(_POLL_SECONDS, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(placement.world_size) if rank not in texts)
                raise Fault(f"rank {missing} did not come in time") from None
            connection.settimeout(_LINE_SECONDS)
            stream = opened.enter_context(opened.enter_context(connection).makefile("rw"))
            rank, said = _introduced(stream, topic, placement.world_size, texts)
            if said is not None:
                texts[rank] = said
                streams.append(stream)
        answer = json.dumps([texts[rank] for rank in range(placement.world_size)])
        for stream in streams:
            with contextlib.suppress(OSError):  # the others will soon notice a rank that is gone
                _say(answer, stream)
    return json.loads(answer)


def _introduced(stream: TextIO, topic: str, world_size: int, texts: Mapping[int, str]) -> tuple[int, str | None]:
    """Read a rank and its text; the text is None if the sender is not a rank, or is refused."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        about, claimed_size, rank, text = json.loads(stream.readline(_MAX_CHARACTERS))
        if about != topic or type(rank) is not int or type(claimed_size) is not int or not isinstance(text, str):
            return 0, None
        if claimed_size != world_size:
            expected, received = f"{world_size} ranks, as rank 0 does", f"{claimed_size} from rank {rank}"
        elif rank in texts:
            expected, received = "every rank once", f"rank {rank} of {world_size} twice"
        else:
            return (rank, text) if 0 < rank < world_size else (0, None)
        _say(
            json.dumps(f"expected {expected}, received {received}; correct RANK and WORLD_SIZE, and start it again"),
            stream,
        )
    return 0, None


def _say(line: str, stream: TextIO) -> None:
    print(line, file=stream, flush=True)
