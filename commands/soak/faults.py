"""Faults that a job on this machine can be given, and what must hold of its end."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass

from allstep.commands.soak.training import Training

# What a fault and what is left of a job may take. A report of a stall comes STALL_SECONDS after the fault.
END_SECONDS = 15
CLEAN_SECONDS = 10
STALL_SECONDS = 3
POLL_SECONDS = 0.05
REPORTED = re.compile(r"allstep: ranks? \d.* stopped")


class Violation(Exception):
    """What must hold does not; the message says what and where."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault: a signal, or a trainer that goes wrong by itself."""

    number: signal.Signals | None = None
    target: str = "rank"
    """Who gets the signal: a `rank`, all `ranks` or the `launcher`."""
    program: str = ""
    """The fault of `commands/soak/fault_injection.py` in place of a signal."""
    is_notice: bool = False
    """Whether the run saves, ends with status 0 and says that it is resumable."""
    can_report: bool = True
    """Whether there is still a terminal to print it on."""


KINDS = {
    "a killed rank": Kind(signal.SIGKILL),
    "a rank that raises": Kind(program="raises"),
    "a rank stuck in the input": Kind(program="stuck"),
    "a rank that leaves a collective out": Kind(program="leaves-out"),
    "SIGTERM to the launcher": Kind(signal.SIGTERM, "launcher"),
    "SIGINT to the launcher": Kind(signal.SIGINT, "launcher"),
    "SIGKILL to the launcher": Kind(signal.SIGKILL, "launcher", can_report=False),
    "SIGTERM to all ranks": Kind(signal.SIGTERM, "ranks", is_notice=True),
    "SIGUSR1 to a rank": Kind(signal.SIGUSR1, is_notice=True),
}


@dataclass(frozen=True)
class InjectedFault:
    """A fault to come."""

    kind: str
    rank: int
    """Whom it befalls, where it is one rank."""
    step: int
    """Of the run, at which it is due."""
    delay: float = 0.0
    """Seconds from then on, for a signal."""

    def program(self, framework: str, first_step: int) -> list[str]:
        """What to run with `python`: the trainer, or one that goes wrong; `first_step` is that of this start."""
        program = KINDS[self.kind].program
        if not program:
            return ["-m", f"allstep.{framework}.train"]
        return faulty(framework, program, self.rank, self.step - first_step + 1)

    def strike(self, run: Training) -> bool:
        """Wait until the fault is due and let it happen; False where the job has ended before."""
        kind = KINDS[self.kind]
        if kind.program:
            run.wait_for_step(self.step - 2)  # a step is reported while the next one is computed
            return run.status != 0
        assert kind.number is not None  # what no program does, a signal does
        run.wait_for_step(self.step, self.delay)
        if kind.target == "launcher":
            return run.signal_launcher(kind.number)
        ranks = run.ranks() if kind.target == "ranks" else [self.rank]
        return any([run.signal_rank(rank, kind.number) for rank in ranks])


def faulty(framework: str, fault: str, rank: int, step: int) -> list[str]:
    """What to run with `python` for a trainer that goes wrong by itself (`commands/soak/fault_injection.py`)."""
    return ["-m", "allstep.commands.soak.fault_injection", framework, fault, str(rank), str(step)]


def check_ended(run: Training, kind: Kind) -> float | None:
    """Wait for the end of a job that was given a fault.

    Returns: how many seconds it took; None where the training had ended before, and only processes were left to end.

    Raises:
        Violation: it hangs, leaves processes, has the wrong status, or does not report what happened exactly once.
    """
    struck = time.monotonic()
    try:
        status = run.wait(END_SECONDS)
    except TimeoutError:
        raise Violation(f"hangs {END_SECONDS} s after the fault: {run.printed()}") from None
    seconds = time.monotonic() - struck
    deadline = time.monotonic() + CLEAN_SECONDS
    while left := run.left():
        if time.monotonic() > deadline:
            raise Violation(f"left the processes {left}: {run.printed()}")
        time.sleep(POLL_SECONDS)
    output = run.printed()
    if run.reported_its_end():
        return None
    if kind.is_notice and (status or output.count("resumable") != 1):
        raise Violation(f"expected status 0 and `resumable`, received {status}: {output}")
    if not kind.is_notice and not status:
        raise Violation(f"ended with status 0: {output}")
    if kind.can_report and len(REPORTED.findall(output)) != 1:
        raise Violation(f"expected one report, received {len(REPORTED.findall(output))}: {output}")
    return seconds
