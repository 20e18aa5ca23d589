"""Child process for the tests of kills and full disks: `python checkpoint_child.py VERB DIR`.

Every state follows only from its step, so that any process that loads one can tell whether it was ever saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import Checkpoints, OutputDirectory, Progress, TrainState, load


def state_of(step: int, size: int = 30_000) -> TrainState:
    values = np.random.default_rng(step).standard_normal(size, np.float32)
    return TrainState(
        framework="pytorch",
        arrays={"model/weight": values, "optimizer/weight/momentum": values + 1},
        progress=Progress(epoch=0, offset=step, step=step, samples_seen=step),
    )


def warn(message: str) -> None:
    print("warning:", message, flush=True)


def save_forever(directory: str) -> None:
    """Resume from the latest checkpoint, save it again (so that it is replaced), then save each step twice.
    Prints a step once it is known to be on the disk."""
    with OutputDirectory(directory, warn=warn) as output:
        checkpoints = Checkpoints(output, keep=1)
        step = 0
        if any(checkpoints.directory.iterdir()):
            step = load("latest", checkpoints.directory, warn=warn).progress.step
        while True:
            for _ in range(2):
                checkpoints.save(state_of(step), metric=-float(step))  # the best is the oldest one
            checkpoints.wait()
            print(step, flush=True)
            step += 1


def hold(directory: str) -> None:
    """Hold the lock until killed."""
    with OutputDirectory(directory, warn=warn):
        print("held", flush=True)
        signal.pause()


def fill_disk(directory: str) -> None:
    """Save a small state, which fits, and large ones until one does not fit."""
    with OutputDirectory(directory, warn=warn) as output:
        checkpoints = Checkpoints(output)
        checkpoints.save(state_of(1))
        for step in range(2, 1000):
            checkpoints.save(state_of(step, 300_000))
            checkpoints.wait()
            print(step, flush=True)


def limited_fill(directory: str) -> None:
    """Do the same as `fill_disk`, where no file may be larger than 1 MB."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    fill_disk(directory)


def kill_everywhere(directory: str) -> None:
    """Replace a checkpoint and add another, keep one, and get killed before the 1st, 2nd, ... access to the disk.

    Prints the step of the latest checkpoint left by each kill, and finally "done".
    """
    count, killed = 0, True
    while killed:
        count += 1
        root = Path(directory) / str(count)
        with OutputDirectory(root, warn=warn) as output:
            checkpoints = Checkpoints(output, keep=1)
            checkpoints.save(state_of(1))
            checkpoints.close()
        child = os.fork()
        if child == 0:
            _save_until_killed(root, at=count)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        state = load("latest", root / "checkpoints", warn=warn)
        step = state.progress.step
        assert all(np.array_equal(state.arrays[name], a) for name, a in state_of(step).arrays.items())
        with OutputDirectory(root, warn=warn) as output:  # the next run repairs the directory
            checkpoints = Checkpoints(output)
            assert load("latest", checkpoints.directory, warn=warn).progress.step == step
            assert all(path.name.startswith("step-") for path in (root / "checkpoints").iterdir())
        print(step, flush=True)
    print("done")


def _save_until_killed(root: Path, *, at: int) -> None:
    events = 0

    def count_touches(event: str, arguments: tuple) -> None:
        nonlocal events
        # Within rmtree, names are relative to an open directory.
        if event.startswith(("os.", "shutil.")) or (event == "open" and str(root) in str(arguments)):
            events += 1
            if events == at:
                os.kill(os.getpid(), signal.SIGKILL)

    with OutputDirectory(root, warn=warn) as output:
        sys.addaudithook(count_touches)
        checkpoints = Checkpoints(output, keep=1)
        checkpoints.save(state_of(1))
        checkpoints.save(state_of(2))
        checkpoints.close()
    os._exit(0)


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](sys.argv[2])
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
