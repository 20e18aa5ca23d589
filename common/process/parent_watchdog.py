"""Detection of a rank whose launcher is gone.

A launcher that is killed cannot end its ranks. Ranks on the launcher's host lose their parent. Ranks that it started by
ssh keep their parent, a shell, but their output is no longer read.
"""

import contextlib
import os
import select
import signal

from allstep.common.base.compat import is_open_mpi_daemon
from allstep.common.launch.placement import Placement

_LOOK_MILLISECONDS = 1000


def wait_until_orphaned(placement: Placement, parent: int) -> None:
    """Return when `parent`, the process that started this one, is gone, or the reader of this rank's output is."""
    outputs = select.poll()
    # Under other launchers, output may end before the launcher does: torchrun's ranks write where the user chose.
    if placement.launcher == "horovodrun":
        for descriptor in (1, 2):  # standard output and error
            outputs.register(descriptor, 0)  # poll() always reports a closed reader
    while os.getppid() == parent and not outputs.poll(_LOOK_MILLISECONDS):
        pass


def end_cut_off_daemon() -> None:
    """End the Open MPI daemon that started this rank; without mpirun, it stays until TCP times out after 15 minutes."""
    parent = os.getppid()
    with contextlib.suppress(OSError):  # it has already ended
        if is_open_mpi_daemon(parent):
            os.kill(parent, signal.SIGTERM)
