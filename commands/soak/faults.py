"""Faults that can be injected into a job on this machine, and the check of how the job ends."""

import re
import signal
import time
from dataclasses import dataclass

from allstep.commands.shared import process_tree
from allstep.commands.soak.training import Training, words_of

# Limits for a job to end after a fault, and for its processes to be gone. A stall is reported after STALL_SECONDS.
END_SECONDS = 15
CLEAN_SECONDS = 10
STALL_SECONDS = 3
REPORTED = re.compile(r"allstep: ranks? \d.* stopped")


class Violation(Exception):
    """A check failed; the message says what is wrong and where."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault: a signal, or a trainer that fails by itself."""

    number: signal.Signals | None = None
    target: str = "rank"
    """Receiver of the signal: a `rank`, all `ranks` or the `launcher`."""
    program: str = ""
    """Fault of `commands/soak/fault_injection.py`, if the fault is not a signal."""
    is_notice: bool = False
    """Whether the run saves its state, ends with status 0 and reports that it is resumable."""
    can_report: bool = True
    """Whether the job can still report the fault on its terminal."""


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
    """A fault to be injected."""

    kind: str
    rank: int
    """Rank that the fault hits, if it hits a single rank."""
    step: int
    """Step of the run at which the fault is due."""
    delay: float = 0.0
    """Seconds from that step to a signal."""

    def program(self, framework: str, first_step: int) -> list[str]:
        """Return Python's arguments for the trainer, or a faulty one; `first_step` is the first step of this start."""
        program = KINDS[self.kind].program
        if not program:
            return ["-m", f"allstep.{framework}.train"]
        return faulty(framework, program, self.rank, self.step - first_step + 1)

    def strike(self, run: Training) -> bool:
        """Wait until the fault is due and let it happen; return False if the job has ended before."""
        kind = KINDS[self.kind]
        if kind.program:
            run.wait_for_step(self.step - 2)  # a step is reported while the next one is computed
            return run.status != 0
        assert kind.number is not None  # a fault is either a program or a signal
        run.wait_for_step(self.step, self.delay)
        if kind.target == "launcher":
            return run.signal_launcher(kind.number)
        ranks = run.ranks() if kind.target == "ranks" else [self.rank]
        return any([run.signal_rank(rank, kind.number) for rank in ranks])


def faulty(framework: str, fault: str, rank: int, step: int) -> list[str]:
    """Return Python's arguments for a trainer that fails by itself (`commands/soak/fault_injection.py`)."""
    return ["-m", "allstep.commands.soak.fault_injection", framework, fault, str(rank), str(step)]


def check_clean(run: Training) -> None:
    """Wait until no process of a job is left. Raises Violation if one stays."""
    deadline = time.monotonic() + CLEAN_SECONDS
    while left := run.left():
        if time.monotonic() > deadline:
            raise Violation(f"left the processes {[' '.join(words_of(pid)) for pid in left]}: {run.printed()}")
        time.sleep(process_tree.POLL_SECONDS)


def check_ended(run: Training, kind: Kind) -> float | None:
    """Wait for the end of a job after a fault, and return the seconds that it took.

    They are None if training had ended before the fault and only processes had to exit. Raises Violation if the job
    hangs, leaves processes, has the wrong status, or does not report the fault exactly once.
    """
    struck = time.monotonic()
    try:
        status = run.wait(END_SECONDS)
    except TimeoutError:
        raise Violation(f"hangs {END_SECONDS} s after the fault: {run.printed()}") from None
    seconds = time.monotonic() - struck
    check_clean(run)
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
