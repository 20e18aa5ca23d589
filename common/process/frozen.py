"""A process that is frozen is ended: of an elastic job, the others go on without it, but none can while it stays.

A process of its own looks whether this one still says each second that it runs. `python frozen.py SECONDS` is that
process; it reads what this one says, and ends with it.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import time

_BEAT_SECONDS = 1.0


def end_when_frozen(seconds: float) -> None:
    """Have this process ended once it has not run for so many seconds, until it ends by itself."""
    # Without site-packages it takes a hundredth of a second, and eight megabytes.
    command = [sys.executable, "-I", "-S", __file__, str(seconds)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    assert watcher.stdin is not None
    atexit.register(watcher.stdin.close)  # threads end before the process does
    threading.Thread(target=_beat, name="beat", args=(watcher,), daemon=True).start()


def _beat(watcher: subprocess.Popen) -> None:
    assert watcher.stdin is not None
    try:
        while True:
            watcher.stdin.write(b".")
            time.sleep(_BEAT_SECONDS)
    except (OSError, ValueError):  # somebody has ended it, or this process ends
        pass


def watch(process: int, beats: int, seconds: float) -> None:
    """End `process`, the parent of this one, when nothing comes from the descriptor `beats` for so many seconds.

    It counts seconds in which this process runs itself: a host that was suspended as a whole is no frozen process.
    """
    silent = 0.0
    while silent < seconds:
        if select.select([beats], [], [], _BEAT_SECONDS)[0]:
            if not os.read(beats, 4096):
                return
            silent = 0.0
        else:
            silent += _BEAT_SECONDS
    if os.getppid() == process:
        sys.stderr.write(f"allstep: process {process} was frozen for {seconds:.0f} s, and is ended\n")
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a notice to the whole group is for the others
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(os.getppid(), 0, float(sys.argv[1]))
