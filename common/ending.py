"""How a rank ends: the exit status and the one message that the user sees.

A mistake is often found by all ranks at once, and a rank that dies takes the others with it. To have the cause
told once without any communication (it may fail before there is any), ranks speak in turn: rank 0 at once, the
others later in the order of ranks, who only lost another rank last. The first to speak leaves, upon which the
launcher ends the others while they still wait for their turn.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

from allstep.common.errors import Fault, UserError, summary
from allstep.common.launcher import ALONE, Placement, placement

EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# Long enough for a launcher to end the job after the first rank that left (0.1 to 1 s were seen), short
# enough that a mistake seen by the last rank alone ends the job within ten seconds.
_FIRST_TURN_SECONDS = 1.5
_TURN_SECONDS = 0.25
_LAST_TURN = 16


def run_rank(main: Callable[[], None]) -> None:
    """Run `main`; end the process with the exit status and the message of the contract where it raises."""
    try:
        place = placement()
    except UserError as error:
        place = ALONE
        leave(EXIT_USER_ERROR, f"allstep: error: {error}")
    try:
        main()
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "allstep: interrupted" if place.rank == 0 else "")
    except UserError as error:
        _wait_for_turn(place.rank)
        leave(EXIT_USER_ERROR, f"allstep: error: {error}")
    except Exception as error:
        cause = error.__cause__ if isinstance(error, Fault) else error
        _wait_for_turn(_LAST_TURN if cause is not None and is_consequence(cause) else place.rank)
        told = str(error) if isinstance(error, Fault) else summary(error)
        leave(EXIT_FAULT, f"{_traceback(cause)}allstep: {_who(place)} stopped: {told}")


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone."""
    return type(error).__name__ in _CONSEQUENCES or any(text in str(error) for text in _CONSEQUENCE_TEXTS)


_CONSEQUENCES = ("HorovodInternalError", "UnavailableError", "DistBackendError", "DistNetworkError", "DistStoreError")
# The latter are Gloo's.
_CONSEQUENCE_TEXTS = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer")


def _who(place: Placement) -> str:
    return f"rank {place.rank} of {place.world_size} on {socket.gethostname()}"


def _traceback(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)) if error else ""


def _wait_for_turn(turn: int) -> None:
    if turn:
        time.sleep(_FIRST_TURN_SECONDS + _TURN_SECONDS * min(turn, _LAST_TURN))


def leave(status: int, message: str) -> None:
    """End the process at once: an orderly shutdown of MPI or Horovod would wait for ranks that never come."""
    sys.stdout.flush()
    if message:
        print(message, file=sys.stderr, flush=True)
    os._exit(status)
