"""Launch a script under the observer, and refuse runs that show nothing."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.prove.findings import ranks
from allstep.commands.prove.following import follow
from allstep.commands.prove.observer.files import put_back
from allstep.commands.prove.observer.observer import Settings
from allstep.commands.prove.observer.start import environment
from allstep.commands.prove.runs import Rank, Run
from allstep.commands.shared.jobs import running, start
from allstep.commands.shared.scratch import scratch_folder
from allstep.common.base.errors import UserError, quote
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
