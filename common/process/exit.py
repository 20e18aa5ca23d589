"""End of a rank: its exit status, and one message that the user sees.

All ranks often find the same mistake at once, and a rank that dies takes the others with it. To report the cause once
without communication (a run may fail before ranks can communicate), ranks report in turn: rank 0 at once, the others
later in the order of ranks, and ranks that only lost another rank last. The first rank to report exits, and the
launcher ends the others while they wait for their turn. Ranks that watch each other (`common.watch`) are told that a
rank has reported, and exit at once.
"""

import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from os import _exit  # while a user's code runs, os has another one
from typing import NoReturn

from allstep.common.base.errors import Fault, UserError, print_line, quote, summary
from allstep.common.base.resources import host_name
from allstep.common.files.disk import NO_ROOM
from allstep.common.launch.placement import BY_HAND, Placement, apparent_rank, find_placement
from allstep.common.process.output import ending_output, write_to_terminal
from allstep.common.process.parent_watchdog import wait_until_orphaned
from allstep.common.process.requirements import missing_part

EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
WATCH = "watch"
"""Name of the watchdog threads."""

# Long enough for a launcher to end the job after the first rank has exited (0.1 to 1 s were seen); longer for mistakes,
# because most are found before ranks synchronise, and imports take some ranks seconds longer on a busy host. Short
# enough that a mistake found only by the last rank ends the job within ten seconds.
_FIRST_TURN_SECONDS = 1.5
_FIRST_TURN_SECONDS_OF_MISTAKES = 4.0
_TURN_SECONDS = 0.25
_LAST_TURN = 16


def run_rank(main: Callable[[], None]) -> None:
    """Run `main`; if it raises, end the process with an exit status and a message that fit the error."""
    try:
        placement = find_placement()
    except UserError as error:
        time.sleep(seconds_to_turn(apparent_rank(), first=_FIRST_TURN_SECONDS_OF_MISTAKES))
        leave(EXIT_USER_ERROR, f"allstep: error: {error}")
    if placement.launcher not in (None, BY_HAND):  # a shell may exit while its processes go on
        global _launcher
        _launcher = os.getppid()
        threading.Thread(target=_leave_with_launcher, name=WATCH, args=(placement, _launcher), daemon=True).start()
    try:
        with ending_output():
            _call(main)
    except KeyboardInterrupt:
        leave(EXIT_INTERRUPTED, "allstep: interrupted" if placement.rank == 0 else "")
    except UserError as error:
        _failed.set()
        # Ranks that watch each other have synchronised before.
        first = _FIRST_TURN_SECONDS if _send_farewell else _FIRST_TURN_SECONDS_OF_MISTAKES
        time.sleep(seconds_to_turn(placement.rank, first=first))
        leave(EXIT_USER_ERROR, f"allstep: error: {error}")
    except Exception as error:
        _failed.set()
        cause = error.__cause__ if isinstance(error, Fault) else error
        time.sleep(seconds_to_turn(_LAST_TURN if cause is not None and is_consequence(cause) else placement.rank))
        cause_line = str(error) if isinstance(error, Fault) else summary(error)
        trace = "".join(traceback.format_exception(cause)) if cause else ""
        leave(EXIT_FAULT, f"{trace}allstep: {rank_name(placement)} stopped: {cause_line}")


def _call(main: Callable[[], None]) -> None:
    """Call `main`, and raise UserError for what a user can mend: missing packages, launchers or working folders, and
    limits of the machine.
    """
    try:
        main()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        if line := missing_part(error) or _lost_folder():
            raise UserError(line) from None
        raise
    except OSError as error:
        advice = {
            errno.EACCES: "get access to it, or name another",
            errno.ENAMETOOLONG: "give a shorter one",
            errno.EMFILE: _MAKE_ROOM,
            **dict.fromkeys(NO_ROOM, _MAKE_ROOM),
        }
        if error.errno in advice:
            where = f"{quote(error.filename)}: " if error.filename else ""
            raise UserError(f"{where}{error.strerror}; {advice[error.errno]}") from error
        raise
    except (UserError, Fault):
        raise
    except Exception as error:
        if "start new thread" in str(error):
            raise UserError(f"{error}; {_MAKE_ROOM}") from error
        if isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
            raise UserError(f"not enough memory: {summary(error)}; take a smaller network or a larger host") from error
        if "has not been initialized" in str(error):  # Horovod, or torch's process group
            raise UserError(f"{summary(error)} A user's code has ended it; leave that out") from error
        raise


_OUT_OF_MEMORY = (
    *("can't allocate memory", "out of memory", "failed to allocate memory", "OOM when allocating"),
    "failed to map segment",
)
"""Texts of errors of PyTorch on CPUs and GPUs, of TensorFlow, and of the system's loader."""
_MAKE_ROOM = "make room, or raise the limit (ulimit -a)"


def _lost_folder() -> str | None:
    """Return the line about a working folder that was removed; None if it exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the folder where this was started is gone; change to one that exists, and start again"
    return None


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only reports that another rank is gone."""
    return type(error).__name__ in _CONSEQUENCES or any(text in str(error) for text in _CONSEQUENCE_TEXTS)


_CONSEQUENCES = ("HorovodInternalError", "UnavailableError", "DistBackendError", "DistNetworkError", "DistStoreError")
# The last two are messages of Gloo.
_CONSEQUENCE_TEXTS = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer")


def rank_name(placement: Placement) -> str:
    """Describe a rank and its host."""
    return f"rank {placement.rank} of {placement.world_size} on {host_name()}"


def seconds_to_turn(turn: int, *, first: float = _FIRST_TURN_SECONDS) -> float:
    """Return the seconds to wait before reporting: 0 for turn 0, `first` or more for the others."""
    return first + _TURN_SECONDS * min(turn, _LAST_TURN) if turn > 0 else 0.0


def _leave_with_launcher(placement: Placement, parent: int) -> None:
    wait_until_orphaned(placement, parent)
    leave(
        EXIT_FAULT,
        f"allstep: {rank_name(placement)} stopped: its launcher is gone" if placement.local_rank == 0 else "",
    )


_failed = threading.Event()
_leaving, _speaking = threading.Lock(), threading.Lock()
_send_farewell: Callable[[int], None] | None = None
_launcher: int | None = None
"""Process that started this rank, and that reads what it writes."""


def before_leaving(send_farewell: Callable[[int], None] | None) -> None:
    """Make `leave` send the exit status to the other ranks, so that they neither wait for this rank nor report too."""
    global _send_farewell
    _send_farewell = send_farewell


def speak(message: str) -> None:
    """Print why this rank stops; only the first call, from any thread, has an effect."""
    if _speaking.acquire(blocking=False):  # never released
        for stream, text in ((sys.stdout, ""), (sys.stderr, message)):
            with contextlib.suppress(OSError, UserError, SystemExit):  # its reader may be gone
                if stream is not None:  # closed
                    print_line(text, stream) if text else stream.flush()
        if message and _launcher not in (None, os.getppid()):
            write_to_terminal(message)


def note_failure(_kind: object, error: BaseException | None, _stack: object) -> None:
    """Note at once that this rank has failed, for a block with a slow exit; pass this to `ExitStack.push`."""
    if error is not None:
        _failed.set()


def has_failed() -> bool:
    """Return whether this rank has failed; it reports this on its turn, unless another rank has reported before."""
    return _failed.is_set()


def has_spoken() -> bool:
    """Return whether this rank has reported why it stops, and is about to exit."""
    return _speaking.locked()


def leave(status: int, message: str) -> NoReturn:
    """End the process at once; an orderly shutdown of MPI or Horovod would wait for ranks that never come."""
    _leaving.acquire()  # never released: only one thread ends the process
    speak(message)
    if _send_farewell:
        _send_farewell(status)
    _exit(status)
