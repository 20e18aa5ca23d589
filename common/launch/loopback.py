"""Restriction of a job on one host to the loopback interface, so that other hosts cannot connect to its ranks."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from allstep.common.launch.placement import Placement

# Default that horovodrun passes to mpirun.
_BTL_OF_HOROVODRUN = "^openib"


def stay_on_host(placement: Placement, environ: MutableMapping[str, str] = os.environ) -> None:
    """Configure the communication libraries, before they start, for a job on a single host.

    In a job of several hosts it does nothing. Settings of the user are kept. README.md lists what still listens.
    """
    if placement.local_size < placement.world_size:
        return
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    # Open MPI's TCP transport listens at every address, whichever interface it is given, so use only shared memory.
    if environ.get("OMPI_MCA_btl", _BTL_OF_HOROVODRUN) == _BTL_OF_HOROVODRUN:
        environ["OMPI_MCA_btl"] = "self,vader"
