"""Follows what the ranks of a launch write down, until they have ended or wait for each other for ever.

The latter are recognised by what they have written: all of them wait, in many looks nothing has happened and none has
computed, and they do not stand at the same place. Looks are counted and not seconds, since a busy host slows us as it
slows the ranks.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.prove import records
from allstep.commands.prove.observer.start import STACKS
from allstep.commands.prove.records import Record
from allstep.commands.prove.runs import Rank, Run
from allstep.commands.shared.jobs import Job
from allstep.common.files import strict_json
from allstep.common.files.records import from_json

_POLL_SECONDS = 0.1
_STILL_LOOKS = 50
_END_SECONDS = 10.0
"""For a script that was seen enough to end by itself."""


def follow(job: Job, folder: Path, num_ranks: int, time_limit: float) -> tuple[Run, int | None]:
    """Follow a launch to its end.

    Args:
        time_limit: in seconds.

    Returns: what was seen; and the status with which the launch has ended, if it has by itself.

    Raises:
        TimeoutError: it has neither ended nor been seen enough; the message says how far it has come.
    """
    journals: dict[Path, _Journal] = {}
    stillness = _Stillness()
    deadline, ended_at = time.monotonic() + time_limit, None
    while True:
        status = job.status
        has_news = _read_all(folder, journals)
        ranks = [Rank(tuple(journal.records)) for journal in journals.values() if journal.is_of_rank]
        run = Run(num_ranks, tuple(sorted(ranks, key=lambda rank: rank.number)), {})
        if status is not None:
            return run, status
        is_complete = len(ranks) >= num_ranks
        if is_complete and all(rank.ended for rank in ranks):
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > _END_SECONDS:
                return run, None
        elif stillness.lasts(has_news, ranks) and is_complete and _is_deadlock(ranks):
            return Run(num_ranks, run.ranks, _stacks(folder, ranks)), None
        elif time.monotonic() > deadline:
            raise TimeoutError(f"{max((len(rank.steps()) for rank in ranks), default=0)} steps")
        time.sleep(_POLL_SECONDS)


class _Stillness:
    """How long nothing was written, and in how many of the looks at them ranks computed meanwhile."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._num_looks = self._num_busy = 0

    def lasts(self, has_news: bool, ranks: Sequence[Rank]) -> bool:
        """Look once more; returns whether they have been still for long.

        Threads of libraries wake now and then; those of MPI never sleep, so that of a rank that waits for others alone
        nothing is looked at.
        """
        if has_news:
            self._start()
            return False
        self._num_looks += 1
        self._num_busy += any(_computes(rank.pid) for rank in ranks if rank.wait and rank.wait.computes)
        if self._num_looks < _STILL_LOOKS:
            return False
        is_still = 2 * self._num_busy < self._num_looks
        self._start()
        return is_still


def _computes(pid: int) -> bool:
    """Whether a thread of a process runs, or waits for a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class _Journal:
    """The file of a process, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self._stream = open(path, "rb")  # noqa: SIM115 (as long as the process)
        self._rest = b""

    def read(self) -> bool:
        """Read what is new; returns whether there was anything."""
        *lines, self._rest = (self._rest + self._stream.read()).split(b"\n")
        for line in lines:
            content = strict_json.loads(line)
            self.records.append(from_json(getattr(records, content["event"]), content, content["event"]))
        return bool(lines)

    @property
    def is_of_rank(self) -> bool:
        """Whether it is a rank's: what starts ranks neither meets others nor steps."""
        return any(isinstance(record, (records.World, records.Step, records.Forward)) for record in self.records)


def _read_all(folder: Path, journals: dict[Path, _Journal]) -> bool:
    for path in folder.glob("*.jsonl"):
        if path not in journals:
            journals[path] = _Journal(path)
    return any([journal.read() for journal in journals.values()])


def _is_deadlock(ranks: Sequence[Rank]) -> bool:
    waits = [rank for rank in ranks if rank.wait]
    is_still = all(rank.wait or rank.ended for rank in ranks)
    return is_still and bool(waits) and (len(waits) < len(ranks) or len({rank.position for rank in ranks}) > 1)


def _stacks(folder: Path, ranks: Sequence[Rank]) -> dict[int, str]:
    """Where each rank stands, by its own account upon a signal."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(rank.pid, STACKS)
    time.sleep(0.5)
    return {rank.number: (folder / f"{rank.pid}.stacks").read_text() for rank in ranks}
