"""Detection of lost and stuck ranks from the heartbeats that rank 0 has received, and the reports about them.

All functions are pure functions of the heartbeats and of time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from allstep.common.watch.progress_state import PHASES

# Phases that may compile, or read data for the first time.
_COMPILES = ("start", "compile", "step", "validation")
# Phases that end with a collective. If a rank is ahead, all ranks took part in it, and so have compiled as well.
_MET_IN = ("start", "compile", "step")
_PATIENCE_WHEN_NEW = 12
# A rank counts as stuck only after this many times its longest duration of the phase so far.
_SLOWER = 3
# If all ranks are at the same point, it may just be a slow step, since no rank is known to wait.
_PATIENCE_WITH_ALL = 12
_SLOWER_THAN_ALL = 10
# If they all are in a phase for the first time, rank 0 may be reading a large checkpoint from a slow file system.
_PATIENCE_WITH_ALL_NEW = 60
# The first training step has no limit then, since the duration of a compilation is unknown.
_UNLIMITED_WHEN_NEW = ("compile", "step")
# Disks, terminals and a user's code may be arbitrarily slow, which must not end a run.
_UNLIMITED = ("writing", "reporting", "hooks")
# Phases in which ranks wait for each other, and what they wait for.
_COLLECTIVES = {
    "step": "the gradients",
    "check": "the all-gather of the replica check",
    "sums": "the all-reduce of sums",
    "checkpoint": "the all-reduce or gather of the state to save",
}
# Phases in which no rank is alone at the end of a run.
_NEEDS_ALL = ("step", "check", "sums")
# A host that goes down takes all its ranks with it; a longer list would not help the user.
_MAX_NAMES = 8


@dataclass
class Seen:
    """State of a rank according to its heartbeats."""

    rank: int
    host: str
    heard_at: float
    """Time of the last message."""
    moved_at: float
    """Time of the last heartbeat that showed progress."""
    step: int = 0
    phase: str = "start"
    is_new: bool = True
    moves: int = 0
    longest: float = 0.0
    """Longest duration of the current phase so far, in seconds; `first` is the duration at the first time."""
    first: float = 0.0

    def hear(
        self, now: float, *, step: int, phase: str, is_new: bool, moves: int, longest: float, first: float
    ) -> None:
        """Update the state by a heartbeat."""
        if moves != self.moves:
            self.moved_at = now
        self.heard_at = now
        self.step, self.phase, self.is_new, self.moves = step, phase, is_new, moves
        self.longest, self.first = longest, first

    @property
    def where(self) -> str:
        """Description of the current phase."""
        return PHASES[self.phase].format(self.step)


@dataclass(frozen=True)
class Stall:
    """Stall of a run: some ranks wait for others that are missing."""

    waiting: tuple[Seen, ...]
    """Waiting ranks; empty if all ranks are at the same point."""
    missing: tuple[Seen, ...]
    seconds: float
    """Seconds without progress."""
    went_on: bool
    """Whether the missing ranks are ahead of the waiting ones, i.e. have skipped a collective."""
    have_ended: bool = False
    """Whether the missing ranks have ended their runs."""


def silent(ranks: Iterable[Seen], now: float, timeout: float) -> list[Seen]:
    """Return the ranks that have sent nothing for `timeout` seconds."""
    return [seen for seen in ranks if now - seen.heard_at > timeout]


def stalled(ranks: Sequence[Seen], now: float, timeout: float) -> Stall | None:
    """Return a stall if some of the ranks hold up the others and have made no progress for `timeout` seconds.

    All ranks go through the same phases, so those with the fewest moves are behind, and the others wait for them,
    unless those behind wait in a collective that the others have skipped. If all ranks are at the same point,
    `split_waiting_and_missing` finds out which ones wait.
    """
    fewest = min(seen.moves for seen in ranks)
    behind = tuple(seen for seen in ranks if seen.moves == fewest)
    ahead = tuple(seen for seen in ranks if seen.moves > fewest)
    phase = behind[0].phase
    seconds = now - max(seen.moved_at for seen in behind)
    is_new = phase == "compile" or (phase in _COMPILES and any(seen.is_new for seen in behind))
    if len(ranks) == 1 or phase in _UNLIMITED or (is_new and not ahead and phase in _UNLIMITED_WHEN_NEW):
        return None
    patience = max(timeout, _SLOWER * max(seen.longest for seen in behind))
    # A step may be slow on all ranks, so patience includes the time that the others took for it. There is an upper
    # limit, since ranks that have skipped a collective may never have to wait.
    took = max(seen.moved_at for seen in ahead) - max(seen.moved_at for seen in behind) if ahead else 0.0
    patience = max(patience, timeout + min(took, timeout * _PATIENCE_WITH_ALL))
    if is_new and not ahead:
        patience = timeout * _PATIENCE_WITH_ALL_NEW
    elif is_new and phase in _MET_IN:
        # As long again as the others took. They may be ahead for less, since a program runs ahead of its GPU.
        patience = took + max(timeout, took)
    elif is_new:
        patience = timeout * _PATIENCE_WHEN_NEW
    if seconds < patience:
        return None
    if ahead and phase in _COLLECTIVES:
        return Stall(waiting=behind, missing=ahead, seconds=seconds, went_on=True)
    return Stall(waiting=ahead, missing=behind, seconds=seconds, went_on=False)


def left_behind(ranks: Sequence[Seen], ended: Sequence[Seen], now: float, timeout: float) -> Stall | None:
    """Return a stall if ranks seem to wait in a collective for others that have ended their runs."""
    seconds = now - max(seen.moved_at for seen in ranks)
    if seconds < timeout or any(seen.phase not in _NEEDS_ALL for seen in ranks):
        return None
    return Stall(waiting=tuple(ranks), missing=tuple(ended), seconds=seconds, went_on=True, have_ended=True)


def confirm_left_behind(
    stall: Stall, timeout: float, tensors: Mapping[int, Sequence[str]], in_collective: Mapping[int, bool]
) -> Stall | None:
    """Return a stall of `left_behind` if the ranks' answers confirm it, else None.

    A rank may go on alone in a user's loop, which names no tensors, such as in a last evaluation or to save. Phases
    other than "step" are those of allstep's own loop, in which a collective is one of all ranks.
    """
    is_long = stall.seconds > timeout * _PATIENCE_WITH_ALL

    def waits(seen: Seen) -> bool:
        is_certain = is_long or seen.phase != "step"
        return bool(tensors.get(seen.rank)) or (is_certain and in_collective.get(seen.rank, False))

    return stall if all(map(waits, stall.waiting)) else None


def split_waiting_and_missing(
    stall: Stall, timeout: float, tensors: Mapping[int, Sequence[str]], in_framework: Mapping[int, bool]
) -> Stall | None:
    """Separate waiting from missing ranks by the ranks' answers; return None if no rank is known to be missing.

    If all ranks are at the same point, those that wait for tensors are waiting; if none does, those inside the
    framework while others are in code outside of it. After a long time, compared with earlier durations of the phase,
    all ranks count as missing.
    """
    if stall.went_on:
        # A rank that waits in a collective is inside the framework; one outside of it is stuck after the collective.
        stuck = tuple(seen for seen in stall.waiting if in_framework.get(seen.rank) is False)
        return Stall(stall.missing, stuck, stall.seconds, went_on=False) if stuck else stall
    if stall.waiting:
        return stall
    for waits in (tensors, in_framework):
        waiting = tuple(seen for seen in stall.missing if waits.get(seen.rank))
        missing = tuple(seen for seen in stall.missing if not waits.get(seen.rank))
        if waiting and missing:
            return Stall(waiting, missing, stall.seconds, went_on=False)
    slowest = max(max(seen.longest, seen.first) for seen in stall.missing)
    return stall if stall.seconds > max(timeout * _PATIENCE_WITH_ALL, slowest * _SLOWER_THAN_ALL) else None


def reason_lost(seconds: float | None) -> str:
    """Return why a rank counts as lost: it was silent for some seconds or, for None, its connection was closed."""
    if seconds is None:
        return "gone without a word: killed, or its host went down"
    return f"not heard of for {seconds:.0f} s: its host is down or cannot be reached, or it is frozen"


def report_lost(lost: Sequence[Seen], world_size: int, step: int, seconds: float | None) -> str:
    """Return the line about lost ranks; `step` is that of rank 0, which trains in lockstep with them."""
    lost = sorted(lost, key=lambda seen: seen.rank)
    return f"allstep: {named(lost)} of {world_size} on {hosts(lost)} stopped at step {step}: {reason_lost(seconds)}"


def report_stall(stall: Stall, world_size: int, tensors: Mapping[int, Sequence[str]], stacks: Mapping[int, str]) -> str:
    """Return the report about a stall: missing ranks with their stacks, and waiting ranks with what they wait for.

    `tensors` are the names of those that a rank waits for, for each rank that knows them; `stacks` are Python stacks by
    rank.
    """
    first = stall.missing[0]
    step = max(seen.step for seen in stall.missing)
    lines = [f"allstep: {named(stall.missing)} of {world_size} on {hosts(stall.missing)} stopped at step {step}: "]
    if stall.have_ended:
        lines[0] += f"its run has ended, and the others, which go on, have waited {stall.seconds:.0f} s for it"
    elif stall.went_on:
        lines[0] += f"left a collective out and went on to {first.where}; the others have waited {stall.seconds:.0f} s"
    else:
        lines[0] += f"stuck for {stall.seconds:.0f} s in {first.where}"
    for seen in stall.waiting[:_MAX_NAMES]:
        lines.append(f"  rank {seen.rank} on {seen.host} waits in {seen.where} for {_awaited(seen, tensors)}")
    for seen in () if stall.have_ended else stall.missing[:_MAX_NAMES]:
        lines.append(f"  rank {seen.rank} on {seen.host} is missing; its Python stack, innermost call last:")
        lines.append(stacks.get(seen.rank, "    (it did not answer)").rstrip())
    return "\n".join(lines)


def _awaited(seen: Seen, tensors: Mapping[int, Sequence[str]]) -> str:
    names = list(tensors.get(seen.rank, ()))
    if not names or seen.phase != "step":
        return _COLLECTIVES.get(seen.phase, "the others")
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def named(ranks: Sequence[Seen]) -> str:
    """Format the numbers of ranks, as in `rank 3` or `ranks 4, 5, 6`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(seen.rank) for seen in ranks)}"


def hosts(ranks: Sequence[Seen]) -> str:
    """Return the hosts of ranks without duplicates."""
    return ", ".join(dict.fromkeys(seen.host for seen in ranks))
