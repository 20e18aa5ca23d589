"""Trainer under torchrun whose rank 1 is killed once, for test_elastic.py.

Usage: python elastic_torchrun.py DIRECTORY STEP FLAGS...
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.pytorch import train

KILLED, STEP = Path(sys.argv[1]) / "killed", int(sys.argv[2])


class KilledOnce(Hook):
    def on_step(self, session) -> None:
        if session.placement.rank == 1 and session.progress.step == STEP and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)


run_rank(lambda: train.main(sys.argv[3:], hooks=[KilledOnce()]))
