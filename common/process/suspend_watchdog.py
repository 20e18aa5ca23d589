"""Watchdog that kills a suspended rank, so that an elastic job can continue without it.

The rank sends a heartbeat every second to a watcher process, `python suspend_watchdog.py SECONDS NAME`, which ends
along with the rank.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

_BEAT_SECONDS = 1.0


def end_when_frozen(seconds: float, name: str = "") -> None:
    """Start a watcher that kills this process once it has not run for `seconds`; it is reported by number or `name`."""
    name = name or f"process {os.getpid()}"
    # Without site-packages, the watcher takes 10 ms to start and eight megabytes.
    command = [sys.executable, "-I", "-S", __file__, str(seconds), name]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    assert watcher.stdin is not None
    atexit.register(watcher.stdin.close)  # the thread ends before the process does
    threading.Thread(target=_beat, name="beat", args=(watcher,), daemon=True).start()


def _beat(watcher: subprocess.Popen) -> None:
    assert watcher.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # the watcher was killed, or this process ends
        while True:
            watcher.stdin.write(b".")
            time.sleep(_BEAT_SECONDS)


def watch(process: int, beats: int, seconds: float, name: str) -> None:
    """Kill `process`, the parent of this one, when no heartbeat comes from the descriptor `beats` for `seconds`.

    Only seconds in which this process runs count, so the suspension of a whole host does not kill its processes. Those
    in which the other is busy count a tenth: the import of a large library keeps the interpreter lock, too.
    """
    silent = 0.0
    while silent < seconds:
        if select.select([beats], [], [], _BEAT_SECONDS)[0]:
            if not os.read(beats, 4096):
                return
            silent = 0.0
        else:
            silent += _BEAT_SECONDS / (10 if _is_busy(process) else 1)
    if os.getppid() == process:
        sys.stderr.write(f"allstep: {name} was frozen for {seconds:.0f} s, and is ended\n")
        os.kill(process, signal.SIGKILL)


def _is_busy(process: int) -> bool:
    """Return whether the main thread of a process computes, waits for a core or waits for a disk."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:  # it may have ended
        return file.read().rpartition(") ")[2][0] in "RD"
    return False


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to the whole process group is for the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(os.getppid(), 0, float(sys.argv[1]), sys.argv[2])
