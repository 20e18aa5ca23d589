"""Ranks that know nothing of each other but their number exchange a line of text, through whatever started them.

Strategies that do not communicate through Horovod need each other's addresses before they can talk at all. Each
launcher leaves one way to pass them round: Horovod's key-value store under `horovodrun --gloo`, MPI under `mpirun`
and `horovodrun --mpi`, and under `srun` a port of the first host that follows from the number of the job.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

from allstep.common.errors import Fault, UserError
from allstep.common.launcher import Placement

_PATIENCE_SECONDS = 60.0  # between the arrival of the first and of the last rank
_POLL_SECONDS = 0.05
# What a rank has to say comes at once and is short; a stranger may connect and say nothing, or too much.
_LINE_SECONDS = 2.0
_MOST_CHARACTERS = 4096


def all_gather(text: str, place: Placement, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The texts of all ranks, in the order of ranks. Call it once a process.

    Raises:
        UserError: the launcher offers no way.
        Fault: a rank did not come within a minute, or MPI sees another number of ranks than the launcher says.
    """
    if place.world_size == 1:
        return [text]
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return _through_store(text, place, _store_address(environ))
    if place.launcher == "srun":
        return _through_first_host(text, place, slurm_address(place, environ))
    if place.launcher == "torchrun":
        raise UserError("expected horovodrun, mpirun or srun with this strategy, received torchrun; use one of those")
    return _through_mpi(text, place)


def own_host(place: Placement, environ: Mapping[str, str] = os.environ) -> str:
    """The name or address by which the other ranks reach this host: loopback where there is no other host."""
    if place.local_size == place.world_size:
        return "127.0.0.1"
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        # The host's name for itself may mean nothing elsewhere; the address from which it reaches the launcher does.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_store_address(environ))
            return probe.getsockname()[0]
    if place.launcher == "srun":
        return place.hosts[place.cross_rank]
    return socket.gethostname()


@contextlib.contextmanager
def free_ports(number: int) -> Iterator[list[int]]:
    """Ports of this host that are free, and stay so until the block is left."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("", 0))
        yield [one.getsockname()[1] for one in sockets]


def slurm_address(place: Placement, environ: Mapping[str, str]) -> tuple[str, int]:
    """Where rank 0 of a Slurm step listens: a port below those that Linux gives to clients, apart for each step."""
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    host = "127.0.0.1" if place.local_size == place.world_size else place.hosts[0]
    return host, 20000 + (job * 31 + step) % 12000


def _store_address(environ: Mapping[str, str]) -> tuple[str, int]:
    return environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])


def _through_store(text: str, place: Placement, address: tuple[str, int]) -> list[str]:
    def request(method: str, rank: int, body: str | None = None) -> bytes | None:
        connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, f"/allstep/{rank}", body)
            response = connection.getresponse()
            return response.read() if response.status == http.client.OK else None

    request("PUT", place.rank, text)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    texts: list[str] = []
    while len(texts) < place.world_size:
        found = request("GET", len(texts))
        if found is not None:
            texts.append(found.decode())
        else:
            _wait(deadline, f"rank {len(texts)}")
    return texts


def _through_mpi(text: str, place: Placement) -> list[str]:
    # Open MPI from a wheel does not know where it lies, and mpirun tells the ranks of its own host alone.
    if os.path.exists(os.path.join(sys.prefix, "bin", "orted")):
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    world = MPI.COMM_WORLD
    if world.size != place.world_size:
        raise Fault(
            f"{place.launcher} says {place.world_size} ranks, MPI sees {world.size}; start the job by horovodrun, "
            "or by the mpirun of this environment"
        )
    texts = world.allgather(text)
    MPI.Finalize()  # nothing else is said through it, and a rank that leaves later owes MPI nothing
    return texts


def _through_first_host(text: str, place: Placement, address: tuple[str, int]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    if place.rank == 0:
        return _collect(text, place, address[1], deadline)
    while True:
        try:
            connection = socket.create_connection(address, timeout=_PATIENCE_SECONDS)
        except OSError:
            _wait(deadline, f"rank 0 at {address[0]}:{address[1]}")
            continue
        with connection, connection.makefile("rw") as stream:
            print(json.dumps([place.rank, text]), file=stream, flush=True)
            return json.loads(stream.readline())


def _collect(text: str, place: Placement, port: int, deadline: float) -> list[str]:
    texts = {0: text}
    host = "127.0.0.1" if place.local_size == place.world_size else ""
    with contextlib.ExitStack() as opened:
        try:
            server = opened.enter_context(socket.create_server((host, port), backlog=place.world_size))
        except OSError as error:
            raise Fault(
                f"rank 0 cannot listen at port {port}, which this Slurm step's ranks look for: {error}"
            ) from None
        streams = []
        while len(texts) < place.world_size:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(place.world_size) if rank not in texts)
                raise Fault(f"rank {missing} did not come within {_PATIENCE_SECONDS:g} s") from None
            connection.settimeout(_LINE_SECONDS)
            stream = opened.enter_context(opened.enter_context(connection).makefile("rw"))
            if (found := _introduced(stream, place.world_size)) and found[0] not in texts:
                texts[found[0]] = found[1]
                streams.append(stream)
        answer = [texts[rank] for rank in range(place.world_size)]
        for stream in streams:
            print(json.dumps(answer), file=stream, flush=True)
    return answer


def _introduced(stream: TextIO, world_size: int) -> tuple[int, str] | None:
    """A rank and its text; None for anybody else who connects, or says nothing."""
    try:
        rank, text = json.loads(stream.readline(_MOST_CHARACTERS))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return (rank, text) if rank in range(1, world_size) and isinstance(text, str) else None


def _wait(deadline: float, whom: str) -> None:
    if time.monotonic() > deadline:
        raise Fault(f"{whom} did not come within {_PATIENCE_SECONDS:g} s")
    time.sleep(_POLL_SECONDS)
