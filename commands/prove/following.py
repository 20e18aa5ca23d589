"""Follow the records that the ranks of a launch write, until the ranks have ended or are in a deadlock.

A deadlock is recognised by the records: all ranks wait, over many polls nothing is written and no rank computes, and
the ranks are not at the same place. Polls are counted instead of seconds, since a busy host slows this process as much
as the ranks.
"""

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
"""Seconds that a script has to end by itself once enough of it was observed."""


def follow(job: Job, folder: Path, num_ranks: int, time_limit: float) -> tuple[Run, int | None]:
    """Follow a launch until it has ended, was observed enough or is in a deadlock, for at most `time_limit` seconds.

    It returns the observed run, and the exit status of the launch, if it has ended by itself. Raises TimeoutError,
    which says how far the launch has come, if it has got to none of these in time.
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
    """Counts the polls since anything was written, and those of them in which ranks computed."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._num_looks = self._num_busy = 0

    def lasts(self, has_news: bool, ranks: Sequence[Rank]) -> bool:
        """Poll once more and return whether the ranks have been still for long.

        Threads of libraries wake now and then, and those of MPI never sleep. Ranks that only wait for others are
        therefore not examined.
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
    """Return whether a thread of a process runs, or waits for a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if stat.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class _Journal:
    """The journal file of a process, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        self._stream = open(path, "rb")  # noqa: SIM115 (as long as the process)
        self._rest = b""

    def read(self) -> bool:
        """Read new records and return whether there were any."""
        *lines, self._rest = (self._rest + self._stream.read()).split(b"\n")
        for line in lines:
            content = strict_json.loads(line)
            self.records.append(from_json(getattr(records, content["event"]), content, content["event"]))
        return bool(lines)

    @property
    def is_of_rank(self) -> bool:
        """Whether the journal is a rank's; launchers neither join a process group nor call models nor step."""
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
    """Return the stacks that the ranks write upon a signal, by rank."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.kill(rank.pid, STACKS)
    time.sleep(0.5)
    return {rank.number: (folder / f"{rank.pid}.stacks").read_text() for rank in ranks}
