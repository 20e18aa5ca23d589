"""A rank whose launcher is gone.

A launcher that is killed cannot end its ranks. Those on its own host lose their parent; those that it started by ssh
keep theirs, a shell, but what they write goes nowhere any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from allstep.common.compat import is_open_mpi_daemon
from allstep.common.launch.placement import Placement

_LOOK_MILLISECONDS = 1000


def wait_until_orphaned(place: Placement, parent: int) -> None:
    """Return when the process `parent`, which started this one, is gone, or whoever reads what this rank writes."""
    outputs = select.poll()
    # Under other launchers output may well end before the launcher: torchrun's ranks write where the user chose.
    if place.launcher == "horovodrun":
        for descriptor in (1, 2):  # standard output and error
            outputs.register(descriptor, 0)  # that nobody reads is reported without asking for it
    while os.getppid() == parent and not outputs.poll(_LOOK_MILLISECONDS):
        pass


def end_cut_off_daemon() -> None:
    """End Open MPI's daemon that started this rank: without mpirun it stays until TCP gives up, in a quarter hour."""
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has ended by itself
        if is_open_mpi_daemon(parent):
            os.kill(parent, signal.SIGTERM)
