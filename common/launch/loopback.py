"""Keeps a job on one host off the network: what its ranks listen at, other hosts cannot reach."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from allstep.common.launch.placement import Placement

# What horovodrun says on its command line where the user says nothing.
_BTL_OF_HOROVODRUN = "^openib"


def stay_on_host(placement: Placement, environ: MutableMapping[str, str] = os.environ) -> None:
    """Configure the libraries that communicate, before they start, for a job on this host alone.

    Does nothing where there are others. What the user has chosen stays. README.md lists what listens nevertheless.
    """
    if placement.local_size < placement.world_size:
        return
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    # Open MPI's TCP listens at every address, whichever interface it is given: so none of it, but shared memory.
    if environ.get("OMPI_MCA_btl", _BTL_OF_HOROVODRUN) == _BTL_OF_HOROVODRUN:
        environ["OMPI_MCA_btl"] = "self,vader"
