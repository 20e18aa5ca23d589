"""Train as `train.py` does, and write how long each replica check took, in seconds, to a JSON file.

    horovodrun -np 2 python -m allstep.benchmarks.timed_check pytorch checks.json [flags of train.py]

The first check comes after the broadcast, the second after step 1, the others after each epoch.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from allstep.commands.shared.rank import open_session
from allstep.commands.shared.records.files import write_json


def timed(check: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    """`check`, which adds the seconds it took to a list."""

    def timed_check(*arguments: object) -> None:
        started = time.perf_counter()
        check(*arguments)
        seconds.append(time.perf_counter() - started)

    return timed_check


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the seconds."""
    framework, output, *arguments = sys.argv[1:] if argv is None else argv
    seconds: list[float] = []
    if session := open_session(framework, arguments):
        dataclasses.replace(session, check_replicas=timed(session.check_replicas, seconds)).train()
        if session.placement.rank == 0:
            write_json(Path(output), seconds)


if __name__ == "__main__":
    main()
