"""A trainer whose rank 1 has missed the broadcast of one weight, and which does not look whether ranks agree.

python tests/launch/ranks/missed_broadcast.py FRAMEWORK [FLAGS of the trainer]
"""

from __future__ import annotations

import dataclasses
import sys

from allstep.benchmarks.comparison.rank import open_session
from allstep.common.process.exit import run_rank


def main() -> None:
    framework, *flags = sys.argv[1:]
    session = open_session(framework, flags)
    if session is None:
        return
    if session.place.rank == 1:
        _, first = next(session.worker.parameters())
        first += 1
    dataclasses.replace(session, check_replicas=lambda *_: None).train()


run_rank(main)
