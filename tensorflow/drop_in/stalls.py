"""Limit of the time that ranks wait for each other, so that what no check foresees ends with the ranks' stacks."""

import faulthandler
import os
import signal
import sys

from allstep.common.base.errors import UserError, note
from allstep.common.launch.placement import Placement
from allstep.common.launch.variables import read_number
from allstep.tensorflow.drop_in.reduction import is_elastic

STALL_SECONDS = 600
"""Longer than one rank may evaluate or write while the others wait."""
_LIMIT, _WARNING, _NO_CHECK = (
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "HOROVOD_STALL_CHECK_DISABLE",
)
_MAX_SECONDS = 10**6
_SECONDS_TO_WARN = 60


def limit_stalls(placement: Placement, seconds: int) -> None:
    """Have Horovod end the job when a rank has waited for another for `seconds`; 0 means never.

    Horovod reads the limit when it is initialised; a user's variable takes precedence. The ranks that wait then raise
    an error where they stand, and the launcher ends the others by SIGTERM, upon which they print where they stand.
    Raises UserError if the limit is no whole number of seconds.
    """
    if placement.world_size == 1 or is_elastic() or os.environ.get(_NO_CHECK, "0") not in ("", "0"):
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 <= seconds <= _MAX_SECONDS:
        raise UserError(f"stall_timeout must be a whole number of seconds from 0 to {_MAX_SECONDS}, got {seconds!r}")
    if os.environ.get(_LIMIT):
        seconds = read_number(_LIMIT, os.environ, maximum=_MAX_SECONDS, remedy="correct it, or unset it")
    os.environ[_LIMIT] = str(seconds)
    if not seconds:
        return
    # Horovod takes no limit below the time of its warning.
    os.environ.setdefault(_WARNING, str(max(1, min(_SECONDS_TO_WARN, seconds // 2))))
    _tell_stack_when_ended()
    if placement.rank == 0:
        note(
            f"a rank that waits for another for {seconds} s ends the job; change it by "
            f"hvd.init(stall_timeout=SECONDS) or {_LIMIT}, 0 means never"
        )


def _tell_stack_when_ended() -> None:
    """Print the stack of the main thread upon SIGTERM, also where it stands in C code, and then end as before."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # a notebook's
        return
    faulthandler.register(signal.SIGTERM, file=descriptor, all_threads=False, chain=True)
