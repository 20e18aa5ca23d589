"""Launch a script under the observer, follow the records that its ranks write, and refuse runs that show nothing.

A deadlock is recognised by the records: all ranks wait, over many polls nothing is written and no rank computes, and
the ranks are not at the same place. Polls are counted instead of seconds, since a busy host slows this process as much
as the ranks.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.prove import records
from allstep.commands.prove.findings import ranks
from allstep.commands.prove.observer.files import put_back
from allstep.commands.prove.observer.observer import Settings
from allstep.commands.prove.observer.start import STACKS, environment
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import Record
from allstep.commands.prove.runs import Run
from allstep.commands.shared.jobs import Job, running, scratch_folder, start
from allstep.common.base.errors import UserError, quote
from allstep.common.files import strict_json
from allstep.common.files.strict_json import from_json
from allstep.common.launch.rendezvous import free_ports

ITSELF = "python"
"""Launcher of a script that starts its ranks itself."""
MIRRORED = "mirrored"
"""Launcher of a script that is one process, in which a strategy of tf.distribute uses several devices."""
TF_CONFIG = "tf-config"
"""Launcher that describes the ranks to MultiWorkerMirroredStrategy by the variable TF_CONFIG."""
_BY_ITSELF = (ITSELF, MIRRORED)


@dataclass(frozen=True)
class Script:
    """A user's script and how it is run."""

    path: Path
    arguments: Sequence[str]
    launcher: str
    num_steps: int
    time_limit: float

    def observe(self, num_ranks: int) -> Run:
        """Run the script on one or several ranks. If it fails after several have all stepped, the steps may show why.

        Files that a single rank overwrites in training are restored, so that the run on several ranks begins alike.
        Raises UserError if the script fails earlier, exceeds the time limit, or never steps.
        """
        with scratch_folder("prove") as name:
            folder = Path(name).resolve()
            num_devices = num_ranks if self.launcher == MIRRORED else None
            settings = Settings(str(folder), str(self.path), self.num_steps, num_devices, keeps_files=num_ranks == 1)
            commands = self._commands(num_ranks)
            with running(*commands, environ=environment(settings)) as job:
                try:
                    run, status = follow(job, folder, num_ranks, self.time_limit)
                except TimeoutError as error:
                    raise UserError(
                        f"expected {quote(self.path)} to end, or to come through {self.num_steps} steps of two epochs, "
                        f"within {self.time_limit:g} s, received {error}; raise --timeout, or lower --steps"
                    ) from None
                if self.launcher not in _BY_ITSELF:
                    run = _without_helpers(run)
                failure = failure_of(run, status, job.printed())
            put_back(run.writes)
            self._check(run, failure)
            num_ranks = len(run.ranks) if self.launcher in _BY_ITSELF else num_ranks
            return replace(run, num_ranks=num_ranks, failure=failure)

    def _commands(self, num_ranks: int) -> list[list[str]]:
        words = list(map(str, (self.path, *self.arguments)))
        if self.launcher != TF_CONFIG:
            return [[*start(None if self.launcher in _BY_ITSELF else self.launcher, num_ranks), *words]]
        with free_ports(num_ranks) as ports:
            workers = [f"127.0.0.1:{port}" for port in ports]
        tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(num_ranks)]
        return [["env", f"TF_CONFIG={json.dumps(task)}", *start(None), *words] for task in tasks]

    def refusal(self, run: Run, failure: str) -> UserError:
        """Return the error for a script that fails by itself."""
        return UserError(
            f"expected {quote(self.path)} to run on {run.num_ranks} rank(s), received its failure: {failure}; "
            "fix that first"
        )

    def _check(self, run: Run, failure: str) -> None:
        """Refuse a run that shows nothing."""
        if run.has(records.SHARED):
            raise UserError(
                f"expected ranks of {quote(self.path)} with weights of their own, received weights in memory that "
                "processes share (Hogwild), whose steps wait for no other; prove compares steps that ranks share"
            )
        is_whole = len(run.ranks) >= run.num_ranks or self.launcher in _BY_ITSELF
        if failure and (run.num_ranks == 1 or not next(run.steps(), None) or not is_whole):
            raise self.refusal(run, failure)
        if run.ranks and not is_whole:
            raise UserError(
                f"expected {quote(self.path)} to train on {run.num_ranks} ranks, received {len(run.ranks)} that train "
                "or join a process group; let all do so, or lower -np"
            )
        idle = [rank.number for rank in run.ranks if not rank.steps() and rank.forwards(training=True)]
        if idle and len(idle) < len(run.ranks) and not run.stacks and not run.is_deserted:
            raise UserError(
                f"expected all ranks of {quote(self.path)} to step an optimizer, received no step on {ranks(idle)}, "
                "which trains as well; let all ranks step, unless one of them is to be a parameter server"
            )
        if not run.stacks and not run.is_deserted and not any(rank.steps() for rank in run.ranks):
            raise UserError(
                f"expected {quote(self.path)} to train, received a script that ended without a step of an optimizer "
                "of PyTorch or Keras that has gradients; name one that steps, with arguments upon which it does"
            )
        if run.num_ranks > len(run.ranks) == 1 and self.launcher in _BY_ITSELF:
            what = "replicas of a MirroredStrategy" if self.launcher == MIRRORED else "ranks that it starts"
            raise UserError(
                f"expected {quote(self.path)} to train on several {what}, received one; give it several, or say by "
                "--launcher how its ranks are started"
            )


def _without_helpers(run: Run) -> Run:
    """Return a run without processes that ranks start and that take no steps, such as actors."""
    stepping = {rank.number for rank in run.ranks if rank.steps()}
    return replace(run, ranks=tuple(rank for rank in run.ranks if rank.steps() or rank.number not in stepping))


def failure_of(run: Run, status: int | None, printed: str) -> str:
    """Return in one line why a script has failed by itself; empty if it has not.

    `status` is the exit status of the launcher, None if it has not ended yet; `printed` the output of both.
    """
    if run.was_seen or run.stacks or run.is_deserted:
        return ""
    errors = [f"{rank.error}{_place(rank)}" for rank in run.ranks if rank.error]
    if errors or not status:  # a launcher may take long to notice a failed rank
        others = [f", while rank {r.number} was in {r.wait.what} ({r.wait.line})" for r in run.ranks if r.wait]
        return "".join([errors[0], *others]) if errors else ""
    return _cause(printed) or f"status {status}"


def _place(rank: Rank) -> str:
    """Return the line of the script in which a rank has failed, in parentheses; empty if it is unknown."""
    return f" ({rank.ended.line})" if rank.ended and rank.ended.line else ""


def _cause(printed: str) -> str | None:
    """Return the last error that was printed, except torchrun's own, which names no cause."""
    lines = [re.sub(r"^\[\d+(,\d+)?\]<std(out|err)>:", "", line).strip() for line in printed.splitlines()]
    errors = [line for line in lines if re.match(r"(allstep: error: |[\w.]*(Error|Exception|Exit)(:|$))", line)]
    signals = [found[0] for line in lines if (found := re.search(r"Signal \d+ \(\w+\) received", line))]
    errors = [error for error in errors if not error.startswith("torch.distributed.elastic")]
    return [*signals, *errors][-1] if signals or errors else None


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
        elif stillness.lasts(has_news, ranks) and is_complete and is_deadlock(ranks):
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
        self._num_busy += any(_computes(rank.pid) for rank in ranks if _may_compute(rank))
        if self._num_looks < _STILL_LOOKS:
            return False
        is_still = 2 * self._num_busy < self._num_looks
        self._start()
        return is_still


def _may_compute(rank: Rank) -> bool:
    return any(wait.computes for wait in (rank.waits if rank.wait else ()))


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


def is_deadlock(ranks: Sequence[Rank]) -> bool:
    """Return whether ranks that are still wait for ever.

    They wait at different places, or each in several threads, whose collectives then have come in other orders.
    """
    if len(ranks) > 1 and all(len(rank.waits) > 1 for rank in ranks):
        return True
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
