"""What a rank is doing: written by the training loop, read by the thread that watches.

Both sides are plain attribute writes and reads: the loop never takes a lock and never waits, but for the moment in
which the ranks agree where to stop.
"""

from __future__ import annotations

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
}
"""What a rank may be doing, with its step."""


class ProgressState:
    """A rank's place in the run, and the point at which all ranks stop together when they are asked to.

    A tick is a unit of work in which ranks wait for one another at most once it has begun: a training step, or a
    batch of validation. All ranks go through the same ticks.

    Stopping together needs a tick that no rank has passed, and no rank may wait for another one that has stopped. A
    margin ("a hundred steps from now") would be a guess about how long a message takes. Instead

    1. `freeze` on each rank returns the last tick that it has begun, and from then on no new tick begins;
    2. the last tick is the highest of those numbers; `decide` gives it to each rank;
    3. each rank goes on to the end of that tick.

    No rank has begun a later tick, by 1. And each rank reaches the end of the last tick: what it waits for in there
    comes from ranks that go through the same ticks up to the last one. A rank that waits for the decision holds up
    others no longer than messages between the threads that watch take, which need no training loop to proceed.

    That 1 holds without a lock: the loop writes `tick` and then reads `_frozen`, `freeze` writes `_frozen` and then
    reads `tick`. Python runs these in some order, so at least one side sees what the other wrote: either the number
    includes the new tick, or the loop sees that it must wait, and then goes on only if the decision allows that tick.
    """

    def __init__(self) -> None:
        self.phase = "start"
        """What the rank does: one of `PHASES`."""
        self.is_new = True
        """Whether it does that for the first time, and may have to compile first."""
        self.moves = 0
        """How often the phase changed: the same on all ranks at the same point of the run."""
        self.step = 0
        """The training step it is in, or has ended last."""
        self.tick = 0
        """The last tick that has begun."""
        self.longest: dict[str, float] = {}
        """The longest that it has been in each phase, in seconds, but for the first time."""
        self.first: dict[str, float] = {}
        """How long it was in each phase for the first time."""
        self._since = time.monotonic()
        self._frozen = False
        self._decided = threading.Event()
        self._last_tick = 0
        self.notice = ""
        """Name of the signal for which the ranks stop; empty until they have agreed to."""

    @property
    def where(self) -> str:
        """The rank's place in words."""
        return PHASES[self.phase].format(self.step)

    def enter(self, phase: str) -> None:
        """Say what comes next. All ranks call it with the same phases in the same order."""
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
        """Begin a tick; False where the ranks have agreed to stop before it."""
        self.tick += 1
        if self._frozen:
            self._decided.wait()
            if self.tick > self._last_tick:
                self.tick -= 1
                return False
        return True

    def freeze(self) -> int:
        """Let no further tick begin until `decide` is called, and return the last one that has begun."""
        self._frozen = True
        return self.tick

    def decide(self, last_tick: int, notice: str) -> None:
        """Let ticks begin up to `last_tick`, since all ranks were given `notice`."""
        self._last_tick, self.notice = last_tick, notice
        self._decided.set()
