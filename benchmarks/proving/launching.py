"""Launches a script under its observer, follows what its ranks write, and ends it when enough was seen.

Ranks that wait for each other for ever are recognised by what they have written: all of them wait, nothing has happened
for seconds, and they do not stand at the same place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from allstep.benchmarks.harness import process_tree
from allstep.benchmarks.harness.jobs import Job, running
from allstep.benchmarks.harness.launchers import start
from allstep.benchmarks.proving import records
from allstep.benchmarks.proving.observer.start import STACKS, Settings, environment
from allstep.benchmarks.proving.records import Record
from allstep.benchmarks.proving.runs import Rank, Run
from allstep.common.files import strict_json
from allstep.common.files.records import from_json
from allstep.common.launch.rendezvous import free_ports
from allstep.common.process.errors import UserError, shown

TF_CONFIG = "tf-config"
"""The launcher of ranks that TensorFlow's MultiWorkerMirroredStrategy reads from the variable TF_CONFIG."""
ITSELF = "python"
"""No launcher: the script starts its ranks."""

_POLL_SECONDS = 0.1
_STILL_SECONDS = 5.0
"""For so long nothing happens before ranks are said to wait for each other; all of them wait, so none computes."""
_END_SECONDS = 10.0
"""For a script that was seen enough to end by itself."""


@dataclass(frozen=True)
class Script:
    """A user's script and how it is run."""

    path: Path
    arguments: Sequence[str]
    launcher: str
    num_steps: int
    time_limit: float

    def observe(self, num_ranks: int) -> Run:
        """Run it on so many ranks.

        Raises:
            UserError: it fails by itself, takes longer than the limit, or never steps.
        """
        with tempfile.TemporaryDirectory(prefix="allstep-prove-") as name:
            folder = Path(name).resolve()
            environ = environment(Settings(str(folder), str(self.path), self.num_steps))
            with ExitStack() as stack:
                guard = stack.enter_context(process_tree.guardian())
                ports = stack.enter_context(free_ports(num_ranks))
                job = stack.enter_context(running(*self._commands(num_ranks, ports), environ=environ))
                guard(job.mark)
                return self._follow(job, folder, num_ranks)

    def _commands(self, num_ranks: int, ports: Sequence[int]) -> list[list[str]]:
        words = list(map(str, (self.path, *self.arguments)))
        if self.launcher != TF_CONFIG:
            return [[*start(None if self.launcher == ITSELF else self.launcher, num_ranks), *words]]
        workers = [f"127.0.0.1:{port}" for port in ports]
        tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(num_ranks)]
        return [["env", f"TF_CONFIG={json.dumps(task)}", *start(None), *words] for task in tasks]

    def _follow(self, job: Job, folder: Path, num_ranks: int) -> Run:
        journals: dict[Path, _Journal] = {}
        deadline, last_change, stacks = time.monotonic() + self.time_limit, time.monotonic(), {}
        ended_at: float | None = None
        while True:
            status = job.status
            if _read_all(folder, journals):
                last_change = time.monotonic()
            ranks = [Rank(tuple(journal.records)) for journal in journals.values() if journal.is_of_rank]
            now = time.monotonic()
            if status is not None:
                break
            if len(ranks) >= num_ranks and all(rank.ended for rank in ranks):
                ended_at = ended_at or now
                if now - ended_at > _END_SECONDS:
                    break
            elif len(ranks) >= num_ranks and now - last_change > _STILL_SECONDS and _is_deadlock(ranks):
                stacks = _stacks(folder, ranks)
                break
            elif now > deadline:
                seen = f"after {max((len(rank.steps()) for rank in ranks), default=0)} steps"
                raise UserError(
                    f"expected {shown(self.path)} to come to its end or through {self.num_steps} steps of two epochs, "
                    f"received none of both within {self.time_limit:g} s ({seen}); raise --timeout, or lower --steps"
                )
            time.sleep(_POLL_SECONDS)
        run = Run(num_ranks, tuple(sorted(ranks, key=lambda rank: rank.number)), stacks)
        self._check(run, status, job.printed())
        return run

    def _check(self, run: Run, status: int | None, printed: str) -> None:
        """Refuse a run that shows nothing."""
        was_seen = bool(run.ranks) and all(rank.ended and rank.ended.reason == "steps" for rank in run.ranks)
        errors = [rank.error for rank in run.ranks if rank.error]
        is_left = bool(errors) and len(errors) < len(run.ranks)  # the others have left them
        if status and not was_seen and not run.stacks and not is_left:
            cause = errors[0] if errors else _cause(printed) or f"status {status}"
            raise UserError(
                f"expected {shown(self.path)} to run on {run.num_ranks} rank(s), received its failure: {cause}; "
                "mend that first"
            )
        if not run.stacks and not any(rank.steps() for rank in run.ranks):
            raise UserError(
                f"expected {shown(self.path)} to train, received a script that ended without a step of an optimizer "
                "of PyTorch or Keras; name one that steps, with arguments upon which it does"
            )


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


def _cause(printed: str) -> str | None:
    """The last error that was printed."""
    lines = [re.sub(r"^\[\d+(,\d+)?\]<std(out|err)>:", "", line).strip() for line in printed.splitlines()]
    errors = [line for line in lines if re.match(r"(allstep: error: |[\w.]*(Error|Exception|Exit)\b)", line)]
    return errors[-1] if errors else None
