"""Trainer whose rank 1 is killed each time that there are two ranks, for test_failing_host.py.

Usage: python failing_host.py FLAGS...
"""

from __future__ import annotations

import os
import signal
import sys

from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.pytorch import train

NUM_STEPS = 7


class Kill(Hook):
    def on_start(self, session) -> None:
        self._last = session.progress.step + NUM_STEPS

    def on_step(self, session) -> None:
        if session.placement.rank == 1 and session.progress.step == self._last:
            os.kill(os.getpid(), signal.SIGKILL)


run_rank(lambda: train.main(sys.argv[1:], hooks=[Kill()]))
