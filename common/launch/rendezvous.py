"""Rendezvous of ranks that know only their number: they exchange a line of text through their launcher.

Strategies that do not use Horovod need the addresses of the other ranks before they can communicate. Each launcher
offers one way to exchange them: Horovod's key-value store under `horovodrun --gloo`, MPI under `mpirun` and
`horovodrun --mpi`, a port of the first host that follows from the job number under `srun`, and MASTER_PORT without a
launcher.
"""

import contextlib
import hashlib
import hmac
import http.client
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping

from allstep.common.base.errors import Fault
from allstep.common.launch.env_launcher import address_towards, master_address, meet, wait
from allstep.common.launch.placement import BY_HAND, GLOO_STORE, Placement
from allstep.common.launch.variables import read_address, read_number

_PATIENCE_SECONDS = 60.0  # maximum between the arrival of the first and of the last rank


def all_gather(text: str, placement: Placement, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the texts of all ranks, in the order of ranks. A process may call it only once.

    Raises UserError if rank 0 cannot listen at the address that the others connect to; Fault if a rank did not come
    within a minute, or MPI sees another number of ranks than the launcher.
    """
    if placement.world_size == 1:
        return [text]
    if placement.launcher == "horovodrun":
        return _through_store(text, placement, _store_address(environ))
    if placement.launcher in ("srun", BY_HAND):
        address = (
            slurm_address(placement, environ) if placement.launcher == "srun" else master_address(placement, environ)
        )
        return meet(text, placement, address, topic="addresses", seconds=_PATIENCE_SECONDS)
    return _through_mpi(text, placement)


def local_host(placement: Placement) -> str:
    """Return the name or address by which the other ranks reach this host; loopback if there is no other host."""
    if placement.local_size == placement.world_size:
        return "127.0.0.1"
    if placement.launcher == "horovodrun":
        # Other hosts may not know this host's name, but can use the address from which it reaches the launcher.
        return address_towards(_store_address(os.environ), _PATIENCE_SECONDS)
    if placement.launcher in ("srun", BY_HAND):
        assert placement.cross_rank is not None  # both give the number of this host
        return placement.hosts[placement.cross_rank]
    return socket.gethostname()


@contextlib.contextmanager
def free_ports(number: int) -> Iterator[list[int]]:
    """Return free ports of this host, and keep them reserved until the block ends."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("", 0))
        yield [one.getsockname()[1] for one in sockets]


def slurm_address(placement: Placement, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the address of rank 0 in a Slurm step: a port below Linux's client ports, different for each step."""
    job, step = (
        read_number(name, {name: "0", **environ}, maximum=2**32, remedy="start the job by srun again")
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    host = placement.hosts[0] if placement.rank else ""  # rank 0 listens at all its addresses
    return "127.0.0.1" if placement.local_size == placement.world_size else host, 20000 + (job * 31 + step) % 12000


def _store_address(environ: Mapping[str, str]) -> tuple[str, int]:
    return read_address(*GLOO_STORE, environ, remedy="start the job by horovodrun again")


def _through_store(text: str, placement: Placement, address: tuple[str, int]) -> list[str]:
    def request(method: str, rank: int, text: str = "") -> bytes | None:
        path, body = f"/allstep/{rank}", text.encode()
        content = hashlib.sha256(body).hexdigest()
        signature = _sign(method, path, len(body), content)
        connection = http.client.HTTPConnection(*address, timeout=_PATIENCE_SECONDS)
        with contextlib.closing(connection):
            headers = {"X-Horovod-Content": content, "X-Horovod-Signature": signature}
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            received = response.read()
        expected = _sign("reply", method, path, response.status, hashlib.sha256(received).hexdigest())
        if not hmac.compare_digest(expected, response.headers.get("X-Horovod-Signature", "")):
            raise Fault(f"the reply of horovodrun at {address[0]}:{address[1]} is not signed with the key of this job")
        return received if response.status == http.client.OK else None

    request("PUT", placement.rank, text)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    texts: list[str] = []
    while len(texts) < placement.world_size:
        found = request("GET", len(texts))
        if found is not None:
            texts.append(found.decode())
        else:
            wait(deadline, f"rank {len(texts)}")
    return texts


def _sign(*parts: object) -> str:
    """Return the signature for Horovod's store (commands/horovod/patches/correct, ranks-sign-requests)."""
    key = os.environ.get("HOROVOD_JOB_KEY", "").encode()
    return hmac.new(key, "\n".join(map(str, parts)).encode(), "sha256").hexdigest()


def _through_mpi(text: str, placement: Placement) -> list[str]:
    # Open MPI from a wheel does not know its own path, and mpirun tells it only to ranks on its own host.
    if os.path.exists(os.path.join(sys.prefix, "bin", "orted")):
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init()
    world = MPI.COMM_WORLD
    if world.size != placement.world_size:
        raise Fault(
            f"{placement.launcher} says {placement.world_size} ranks, MPI sees {world.size}; start the job by "
            "horovodrun, or by the mpirun of this environment"
        )
    texts = world.allgather(text)
    MPI.Finalize()  # MPI is not used again, so a rank that exits later need not finalize it
    return texts
