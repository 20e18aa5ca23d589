"""Launches a script under its observer, and refuses what shows nothing."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.benchmarks.harness import process_tree
from allstep.benchmarks.harness.jobs import running
from allstep.benchmarks.harness.launchers import start
from allstep.benchmarks.proving.following import follow
from allstep.benchmarks.proving.observer.start import Settings, environment
from allstep.benchmarks.proving.runs import Run
from allstep.common.process.errors import UserError, shown

ITSELF = "python"
"""No launcher: the script starts its ranks."""


@dataclass(frozen=True)
class Script:
    """A user's script and how it is run."""

    path: Path
    arguments: Sequence[str]
    launcher: str
    num_steps: int
    time_limit: float

    def observe(self, num_ranks: int) -> Run:
        """Run it on so many ranks. Where it fails after all of several have stepped, their steps may show why.

        Raises:
            UserError: it fails before, takes longer than the limit, or never steps.
        """
        with tempfile.TemporaryDirectory(prefix="allstep-prove-") as name:
            folder = Path(name).resolve()
            environ = environment(Settings(str(folder), str(self.path), self.num_steps))
            launcher = None if self.launcher == ITSELF else self.launcher
            command = [*start(launcher, num_ranks), str(self.path), *self.arguments]
            with process_tree.guardian() as guard, running(command, environ=environ) as job:
                guard(job.mark)
                try:
                    run, status = follow(job, folder, num_ranks, self.time_limit)
                except TimeoutError as error:
                    raise UserError(
                        f"expected {shown(self.path)} to end, or to come through {self.num_steps} steps of two epochs, "
                        f"within {self.time_limit:g} s, received {error}; raise --timeout, or lower --steps"
                    ) from None
                failure = _failure(run, status, job.printed())
                self._check(run, failure)
                num_ranks = len(run.ranks) if self.launcher == ITSELF else num_ranks
                return replace(run, num_ranks=num_ranks, failure=failure)

    def refusal(self, run: Run, failure: str) -> UserError:
        """Of a script that fails by itself."""
        return UserError(
            f"expected {shown(self.path)} to run on {run.num_ranks} rank(s), received its failure: {failure}; "
            "mend that first"
        )

    def _check(self, run: Run, failure: str) -> None:
        """Refuse a run that shows nothing."""
        if failure and (run.num_ranks == 1 or not next(run.steps(), None)):
            raise self.refusal(run, failure)
        if not run.stacks and not any(rank.steps() for rank in run.ranks):
            raise UserError(
                f"expected {shown(self.path)} to train, received a script that ended without a step of an optimizer "
                "of PyTorch or Keras; name one that steps, with arguments upon which it does"
            )


def _failure(run: Run, status: int | None, printed: str) -> str:
    """Why it has failed by itself, in a line; empty where it has not."""
    was_seen = bool(run.ranks) and all(rank.ended and rank.ended.reason == "steps" for rank in run.ranks)
    if not status or was_seen or run.stacks or run.is_deserted:
        return ""
    errors = [rank.error for rank in run.ranks if rank.error]
    return errors[0] if errors else _cause(printed) or f"status {status}"


def _cause(printed: str) -> str | None:
    """The last error that was printed, without torchrun's own, which names none."""
    lines = [re.sub(r"^\[\d+(,\d+)?\]<std(out|err)>:", "", line).strip() for line in printed.splitlines()]
    errors = [line for line in lines if re.match(r"(allstep: error: |[\w.]*(Error|Exception|Exit)\b)", line)]
    return next((error for error in reversed(errors) if not error.startswith("torch.distributed.elastic")), None)
