"""Restriction of a job on one host to the loopback interface, so that other hosts cannot connect to its ranks."""

import os
import socket
from collections.abc import Mapping, MutableMapping

from allstep.common.base.errors import UserError, quote
from allstep.common.launch.placement import Placement

_MPI_SEGMENT_BYTES = 4 * 2**20  # btl_vader_segment_size
# Default that horovodrun passes to mpirun.
_BTL_OF_HOROVODRUN = "^openib"


def stay_on_host(placement: Placement, environ: MutableMapping[str, str] = os.environ) -> None:
    """Configure the communication libraries, before they start, for a job on a single host.

    In a job of several hosts it does nothing. Settings of the user are kept. docs/security.md lists what still listens.
    Raises UserError if the job has several hosts, and rank 0's host cannot be resolved here.
    """
    if placement.local_size < placement.world_size:
        if not resolves(name := environ.get("MASTER_ADDR") or "127.0.0.1"):
            raise UserError(
                f"MASTER_ADDR names a host that cannot be resolved here: {quote(name)}; add it to /etc/hosts"
            )
        return
    if not resolves(environ.get("MASTER_ADDR") or "127.0.0.1"):  # torchrun gives the host's name, known to it or not
        environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    # Open MPI's TCP transport listens at every address, whichever interface it is given, so use only shared memory.
    if environ.get("OMPI_MCA_btl", _BTL_OF_HOROVODRUN) == _BTL_OF_HOROVODRUN:
        environ["OMPI_MCA_btl"] = "self,vader"


def resolves(name: str) -> bool:
    """Return whether the name or address of a host has an address here."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def check_shared_memory(placement: Placement, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a /dev/shm without room for the buffers of Open MPI's ranks on this host, which say little without it."""
    if placement.local_size < 2 or "OMPI_COMM_WORLD_RANK" not in environ or not os.path.isdir("/dev/shm"):
        return
    status = os.statvfs("/dev/shm")
    free, needed = status.f_bavail * status.f_frsize, placement.local_size * _MPI_SEGMENT_BYTES
    if free < needed:
        raise UserError(
            f"/dev/shm has {free} bytes left, and MPI takes {needed} for {placement.local_size} ranks; remove what is "
            "left there, or start the container with --shm-size=1g"
        )
