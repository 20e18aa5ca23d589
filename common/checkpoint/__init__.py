"""Checkpoints: exact, atomic, verified, written in the background, and readable by either framework.

Rank 0 locks the output directory and writes checkpoints; any process can load a state by name:

    with OutputDirectory("runs/a", warn=print) as output:
        checkpoints = Checkpoints(output, keep=3)
        checkpoints.save(state, metric=validation_accuracy)    # returns once the arrays are copied
        checkpoints.close()                                     # waits for the last write

    state = load("latest", "runs/a/checkpoints", warn=print)    # or "best", or a path

Modules: `lock` (one run per directory), `files` (one checkpoint, written into a temporary directory and renamed),
`manifest` (checksums over everything), `select` (the latest or best checkpoint, and fallbacks if it is damaged),
`writer` (the background thread, and deletion of old checkpoints).
"""

from allstep.common.checkpoint.files import CorruptCheckpoint
from allstep.common.checkpoint.lock import OutputDirectory
from allstep.common.checkpoint.select import load, load_manifest
from allstep.common.checkpoint.state import Progress, TrainState, check_compatible
from allstep.common.checkpoint.writer import Checkpoints

__all__ = [
    "Checkpoints",
    "CorruptCheckpoint",
    "OutputDirectory",
    "Progress",
    "TrainState",
    "check_compatible",
    "load",
    "load_manifest",
]
