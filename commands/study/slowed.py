"""Train as a trainer does, with one rank that gets its processor only part of the time.

    horovodrun -np 2 python -m allstep.commands.study.slowed --framework pytorch --slow-rank 1 [trainer's flags]

A helper process stops and continues that rank in turn, like another program on its host: this affects every strategy
alike, even if threads of the framework do the work.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from allstep.commands.shared.rank import open_session
from allstep.common.base.flag_types import Parser, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.launch.placement import find_placement
from allstep.common.process.exit import run_rank

_STOPPED_SECONDS, _RUNNING_SECONDS = 0.03, 0.01  # far below what counts as a stall


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("python -m allstep.commands.study.slowed", __doc__)
    parser.add_argument("--framework", type=one_of(*FRAMEWORKS), default=FRAMEWORKS[0])
    parser.add_argument("--slow-rank", type=whole(0, 10**6), required=True, metavar="N")
    flags, trainer_flags = parser.parse_known_args(argv)
    if find_placement().rank == flags.slow_rank:
        slow_down()
    if session := open_session(flags.framework, trainer_flags):
        session.train()


def slow_down() -> None:
    """Start a helper that stops this process for three quarters of the time."""
    program = f"from allstep.commands.study.slowed import brake; brake({os.getpid()})"
    subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL)


def brake(pid: int) -> None:
    """Stop and continue the parent process, which has the id `pid`, until it has ended."""
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_STOPPED_SECONDS)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_RUNNING_SECONDS)


if __name__ == "__main__":
    run_rank(main)
