"""What rank 0 concludes from what it has heard of all ranks: who is lost, who holds up the others, and the words.

Pure functions of what was heard and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from allstep.common.watch.progress_state import PHASES

# What may have to be compiled before, or reads what was never read before.
_COMPILES = ("start", "compile", "step", "validation")
# In these a rank gets ahead by a collective in which the others took part, and so have compiled as well.
_MET_IN = ("start", "compile", "step")
_PATIENCE_WHEN_NEW = 12
# What a rank has taken before may come again, and more, before it counts as stuck.
_SLOWER = 3
# Where all ranks are at the same point, nobody is known to wait: it may be a slow step.
_PATIENCE_WITH_ALL = 12
_SLOWER_THAN_ALL = 10
# And where they all do something for the first time: rank 0 may be reading a checkpoint that is large and far away.
_PATIENCE_WITH_ALL_NEW = 60
# The training step alone is then without limit, for nobody knows how long it compiles.
_UNLIMITED_WHEN_NEW = ("compile", "step")
# Disks and terminals take what they take, and a run must not die of it.
_UNLIMITED = ("writing", "reporting")
# Where ranks wait for each other, and for what.
_COLLECTIVES = {
    "step": "the gradients",
    "check": "the all-gather of the replica check",
    "sums": "the all-reduce of sums",
    "checkpoint": "the all-reduce or gather of the state to save",
}
# A host that dies takes all its ranks with it; more names than these help nobody.
_MAX_NAMES = 8


@dataclass
class Seen:
    """What was heard of a rank."""

    rank: int
    host: str
    heard_at: float
    """When it said anything last."""
    moved_at: float
    """When it was found in another place than before."""
    step: int = 0
    phase: str = "start"
    is_new: bool = True
    moves: int = 0
    longest: float = 0.0
    """Seconds that it has been in this phase at most before, and `first` for the first time."""
    first: float = 0.0

    def hear(
        self, now: float, *, step: int, phase: str, is_new: bool, moves: int, longest: float, first: float
    ) -> None:
        """Take note of a heartbeat."""
        if moves != self.moves:
            self.moved_at = now
        self.heard_at = now
        self.step, self.phase, self.is_new, self.moves = step, phase, is_new, moves
        self.longest, self.first = longest, first

    @property
    def where(self) -> str:
        """Its place in words."""
        return PHASES[self.phase].format(self.step)


@dataclass(frozen=True)
class Stall:
    """Ranks that wait for ranks that do not come."""

    waiting: tuple[Seen, ...]
    """Empty where all ranks are at the same point."""
    missing: tuple[Seen, ...]
    seconds: float
    """Since when nothing has moved."""
    went_on: bool
    """Whether the missing ranks are ahead of those that wait: they left a collective out."""


def silent(ranks: Iterable[Seen], now: float, timeout: float) -> list[Seen]:
    """Ranks of which nothing was heard for `timeout` seconds."""
    return [seen for seen in ranks if now - seen.heard_at > timeout]


def stalled(ranks: Sequence[Seen], now: float, timeout: float) -> Stall | None:
    """Whether some of the ranks hold up the others and have not moved for `timeout` seconds.

    All ranks go through the same phases, so those with the fewest moves are behind. They are the ones that the others
    wait for, unless they wait themselves: in a collective, which the others have passed without them. Where all are
    at the same point, `split_waiting_and_missing` has to say who waits.
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
    # A step may take long on all ranks. Nobody waits before the others are done with it; but one that went on without
    # the others may never have to wait.
    took = max(seen.moved_at for seen in ahead) - max(seen.moved_at for seen in behind) if ahead else 0.0
    patience = max(patience, timeout + min(took, timeout * _PATIENCE_WITH_ALL))
    if is_new and not ahead:
        patience = timeout * _PATIENCE_WITH_ALL_NEW
    elif is_new and phase in _MET_IN:
        # As long again as the others took. They may have been ahead for less: on GPUs a program runs ahead of them.
        patience = took + max(timeout, took)
    elif is_new:
        patience = timeout * _PATIENCE_WHEN_NEW
    if seconds < patience:
        return None
    if ahead and phase in _COLLECTIVES:
        return Stall(waiting=behind, missing=ahead, seconds=seconds, went_on=True)
    return Stall(waiting=ahead, missing=behind, seconds=seconds, went_on=False)


def split_waiting_and_missing(
    stall: Stall, timeout: float, tensors: Mapping[int, Sequence[str]], in_framework: Mapping[int, bool]
) -> Stall | None:
    """Separate who waits from who is missing by what the ranks have answered; None where nobody is, as far as known.

    Where all ranks are at the same point, who waits for tensors waits; failing that, who is inside the framework while
    others are in code outside of it. After a long time (compared with what such a phase has taken before) all of them
    count as missing.
    """
    if stall.went_on:
        # Whoever waits in a collective is inside the framework; who is not was stuck after it.
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
    """Why a rank counts as lost: after so many seconds of silence, or since its connection has ended."""
    if seconds is None:
        return "gone without a word: killed, or its host went down"
    return f"not heard of for {seconds:.0f} s: its host is down or cannot be reached, or it is frozen"


def report_lost(lost: Sequence[Seen], world_size: int, step: int, seconds: float | None) -> str:
    """The line about ranks that are lost; `step` is that of rank 0, which is in step with them."""
    lost = sorted(lost, key=lambda seen: seen.rank)
    return f"allstep: {named(lost)} of {world_size} on {hosts(lost)} stopped at step {step}: {reason_lost(seconds)}"


def report_stall(stall: Stall, world_size: int, tensors: Mapping[int, Sequence[str]], stacks: Mapping[int, str]) -> str:
    """The report about a stall: who is missing, who waits and for what, and where the missing ones are.

    Args:
        tensors: for each rank that knows them, the names of the tensors that it waits for.
        stacks: Python stacks by rank.
    """
    first = stall.missing[0]
    step = max(seen.step for seen in stall.missing)
    lines = [f"allstep: {named(stall.missing)} of {world_size} on {hosts(stall.missing)} stopped at step {step}: "]
    if stall.went_on:
        lines[0] += f"left a collective out and went on to {first.where}; the others have waited {stall.seconds:.0f} s"
    else:
        lines[0] += f"stuck for {stall.seconds:.0f} s in {first.where}"
    for seen in stall.waiting[:_MAX_NAMES]:
        lines.append(f"  rank {seen.rank} on {seen.host} waits in {seen.where} for {_awaited(seen, tensors)}")
    for seen in stall.missing[:_MAX_NAMES]:
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
    """`rank 3`, or `ranks 4, 5, 6`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(seen.rank) for seen in ranks)}"


def hosts(ranks: Sequence[Seen]) -> str:
    """The hosts of ranks, each once."""
    return ", ".join(dict.fromkeys(seen.host for seen in ranks))
