"""Progress of a rank, written by the training loop and read by the watchdog thread.

Both sides use plain attribute writes and reads: the loop never takes a lock, and waits only while the ranks agree
where to stop.
"""

import threading
import time

PHASES = {
    "start": "starting up",
    "input": "reading the input of step {}",
    "compile": "compiling step {}",
    "step": "step {}",
    "check": "the replica check after step {}",
    "sums": "adding up after step {}",
    "validation": "validation after step {}",
    "checkpoint": "gathering the checkpoint of step {}",
    "writing": "writing the checkpoint of step {}",
    "reporting": "reporting step {}",
    "hooks": "a hook after step {}",
}
"""Phases of a rank, with descriptions that take the step."""


class ProgressState:
    """Progress of a rank, and the point at which all ranks stop together upon a notice.

    A tick is a unit of work within which ranks may wait for each other: a training step, or a batch of validation.
    All ranks go through the same ticks.

    To stop together, the ranks need a tick that no rank has passed, and no rank may wait for another one that has
    stopped. A margin ("a hundred steps from now") would be a guess about how long a message takes. Instead

    1. `freeze` on each rank returns the last tick that has begun there, and prevents new ticks from beginning;
    2. the last tick to run is the maximum of these numbers; `decide` passes it to each rank;
    3. each rank continues to the end of that tick.

    By 1, no rank has begun a later tick. Each rank reaches the end of the last tick, because it only waits for ranks
    that go through the same ticks up to the last one. A rank that waits for the decision delays the others only by
    the time of a few messages between watchdog threads, which do not depend on any training loop.

    Step 1 needs no lock: the loop writes `tick` and then reads `_frozen`, while `freeze` writes `_frozen` and then
    reads `tick`. Python runs these in some order, so at least one side sees what the other wrote: either the number
    includes the new tick, or the loop sees that it must wait, and continues only if the decision allows that tick.
    """

    def __init__(self) -> None:
        self.phase: str = "start"
        """Current phase, one of `PHASES`."""
        self.is_new: bool = True
        """Whether the rank is in this phase for the first time, and may have to compile first."""
        self.moves: int = 0
        """Number of phase changes, which is the same on all ranks at the same point of the run."""
        self.step = 0
        """Current or last training step."""
        self.tick: int = 0
        """Last tick that has begun."""
        self.longest: dict[str, float] = {}
        """Longest duration of each phase in seconds, without its first time."""
        self.first: dict[str, float] = {}
        """Duration of each phase at its first time, in seconds."""
        self._since = time.monotonic()
        self._frozen = False
        self._decided = threading.Event()
        self._last_tick = 0
        self.notice: str = ""
        """Notice for which the ranks stop, such as the name of a signal; empty until they have agreed to stop."""

    @property
    def where(self) -> str:
        """Description of the current phase."""
        return PHASES[self.phase].format(self.step)

    def enter(self, phase: str) -> None:
        """Begin the next phase. All ranks go through the same phases in the same order."""
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        if self.is_new:
            self.first[self.phase] = seconds
        elif seconds > self.longest.get(self.phase, 0.0):
            self.longest[self.phase] = seconds
        self.is_new = phase not in self.first
        self.phase = phase
        self.moves += 1

    def begin_tick(self) -> bool:
        """Begin a tick, and return whether it may run; False if the ranks have agreed to stop before it."""
        self.tick += 1
        if self._frozen:
            self._decided.wait()
            if self.tick > self._last_tick:
                self.tick -= 1
                return False
        return True

    def freeze(self) -> int:
        """Prevent further ticks from beginning until `decide` is called, and return the last one that has begun."""
        self._frozen = True
        return self.tick

    def decide(self, last_tick: int, notice: str) -> None:
        """Let ticks begin up to `last_tick`; `notice` is the reason to stop after it."""
        self._last_tick, self.notice = last_tick, notice
        self._decided.set()
