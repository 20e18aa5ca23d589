"""Print where the time of a Horovod timeline went: negotiation, queue, copies, reduction, and overlap with backward.

    horovodrun -np 2 python pytorch/train.py --timeline runs/timeline.json
    allstep timeline runs/timeline.json

A gradient's way begins when rank 0 has it and ends when its sum is back. Negotiation lasts until all ranks have the
gradient; then it waits in the queue for its turn and its data, is copied into the fusion buffer, reduced, and copied
out. Backward itself is not in the timeline, but its gradients are: reduction before a step's last gradient is ready
overlaps with backward.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from allstep.common.base.errors import UserError
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular
from allstep.common.files.strict_json import Mismatch, NotJson, from_json, list_of, mapping, to_json, whole
from allstep.common.training.profiling import Interval, union

STAGES = ("negotiation", "queue", "copy", "reduction")
_KIND = "ALLREDUCE"
_LARGEST_FILE = 256 * 2**20  # bytes; an hour of training a small network, with some GB of events in memory
_MAX_EVENTS = 10**7


Pid = Annotated[int, whole(-(2**31))]


@dataclass(frozen=True)
class Phase:
    """Fields of all events."""

    ph: str | None = None
    """B and E: an activity begins, and the innermost one ends; M: metadata."""


@dataclass(frozen=True)
class Begin:
    """Start of an activity."""

    pid: Pid | None
    """Process id of the tensor: Horovod gives each tensor its own."""
    name: str
    ts: float
    """Microseconds since the start of the run."""


@dataclass(frozen=True)
class End:
    """End of the innermost activity."""

    pid: Pid | None
    ts: float


@dataclass(frozen=True)
class Arguments:
    """Arguments of metadata."""

    name: str | None = None


@dataclass(frozen=True)
class Metadata:
    """Name of a tensor."""

    pid: Pid | None
    args: Arguments = Arguments()


Event = Begin | End | Metadata
_KINDS: dict[str | None, type[Event]] = {"B": Begin, "E": End, "M": Metadata}


@dataclass(frozen=True)
class Way:
    """One gradient's way in one step; intervals in microseconds since the start of the run."""

    start: float
    end: float
    stages: dict[str, list[Interval]]
    """Intervals spent in each stage. The rest of the way is the queue."""

    def seconds(self, stage: str) -> float:
        """Return the time in a stage, in seconds."""
        if stage == "queue":
            return (self.end - self.start) / 1e6 - sum(map(self.seconds, ("negotiation", "copy", "reduction")))
        return sum(end - start for start, end in self.stages[stage]) / 1e6


@dataclass(frozen=True)
class Summary:
    """Medians over the steps of a timeline."""

    num_steps: int
    num_tensors: int
    """Number of gradients in a step."""
    shares: dict[str, float]
    """Share of each stage in the gradients' ways; the shares add up to 1."""
    reduction_seconds: float
    """Time of a step during which at least one gradient was being reduced."""
    overlap: float
    """Share of that time before the step's last gradient was ready."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the summary of a timeline."""
    parser = Parser("allstep timeline", __doc__)
    parser.add_argument("file", type=nonempty_path, metavar="FILE", help="written by --timeline")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(argv)
    found = summary(read_ways(flags.file))
    if flags.json:
        print(json.dumps(to_json(found), indent=1))
        return
    tensors = "one tensor" if found.num_tensors == 1 else f"{found.num_tensors} tensors"
    print(f"{found.num_steps} steps, each with gradients in {tensors}")
    for stage, share in found.shares.items():
        print(f"{stage:12} {share:6.1%} of a gradient's way")
    print(f"{'reduction':12} {1000 * found.reduction_seconds:.3f} ms a step, {found.overlap:.0%} of it during backward")


def read_ways(path: Path) -> dict[str, list[Way]]:
    """Read the ways of all-reduced tensors, by name, in order.

    Raises UserError if the file is no timeline, or has no all-reduce.
    """
    try:
        events = [_event(content, f"event {number}") for number, content in enumerate(_contents(path))]
    except OSError as error:
        raise UserError(f"expected a readable timeline, received {path}: {error.strerror}") from None
    except (NotJson, Mismatch) as error:
        raise UserError(
            f"expected a Horovod timeline, received {path}, in which: {error}; write one with --timeline"
        ) from None
    ways = _ways(filter(None, events))
    if not ways:
        raise UserError(f"expected a Horovod timeline with all-reduces, received {path} without any")
    return ways


def _ways(events: Iterable[Event]) -> dict[str, list[Way]]:
    names: dict[int | None, str] = {}
    open_since: dict[int | None, list[Begin]] = defaultdict(list)
    stages: dict[int | None, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    starts: dict[int | None, float] = {}
    ways: dict[str, list[Way]] = defaultdict(list)
    for event in events:
        pid = event.pid
        if isinstance(event, Metadata):
            if event.args.name is not None:
                names[pid] = event.args.name
        elif isinstance(event, Begin):
            open_since[pid].append(event)
            starts.setdefault(pid, event.ts)
        elif open_since[pid]:
            begin = open_since[pid].pop()
            if stage := _stage(begin.name):
                stages[pid][stage].append((begin.ts, event.ts))
            elif begin.name == _KIND:
                start = starts.pop(pid, begin.ts)
                ways[names.get(pid, str(pid))].append(Way(start, event.ts, stages.pop(pid, defaultdict(list))))
            elif not open_since[pid]:  # the way of another collective
                starts.pop(pid, None)
                stages.pop(pid, None)
    return ways


def _event(content: dict, where: str) -> Event | None:
    """Convert a JSON object to an event; return None for kinds that are not used."""
    kind = _KINDS.get(from_json(Phase, content, where).ph)
    return from_json(kind, content, where) if kind else None


def _contents(path: Path) -> list[dict]:
    """Read the timeline's events as JSON; if the run was killed, up to the break."""
    data = read_regular(path, maximum=_LARGEST_FILE)
    first: NotJson | None = None
    for candidate in (data, data[: data.rfind(b"}") + 1] + b"]", data[: data.rfind(b"},") + 1] + b"]"):
        try:
            content = strict_json.loads(candidate)
        except NotJson as error:
            first = first or error
        else:
            list_of(mapping, maximum=_MAX_EVENTS)(content, "it")
            return content
    assert first
    raise first


def _stage(activity: str) -> str | None:
    """Return the stage of a timeline's activity; None for the queue and for activities of no stage."""
    if activity.startswith("NEGOTIATE_"):
        return "negotiation"
    if activity.startswith("MEMCPY_"):
        return "copy"
    return "reduction" if activity.endswith(f"_{_KIND}") else None


def summary(ways: dict[str, list[Way]]) -> Summary:
    """Summarise the gradients: the tensors that are reduced in every step, without allstep's own."""
    ways = {name: way for name, way in ways.items() if "allstep." not in name} or ways
    maximum = max(map(len, ways.values()))
    # A killed run may have left its last step incomplete.
    gradients = [gradient for gradient in ways.values() if len(gradient) >= maximum - 1]
    num_steps = min(map(len, gradients))
    steps = list(zip(*(gradient[:num_steps] for gradient in gradients), strict=True))
    # In the first step, all ranks learn of the gradients and allocate buffers.
    later = steps[1:] or steps
    shares = {stage: statistics.median(_share(step, stage) for step in later) for stage in STAGES}
    total = sum(shares.values()) or 1.0
    seconds, overlaps = map(statistics.median, zip(*map(_reduction, later), strict=True))
    shares = {stage: share / total for stage, share in shares.items()}
    return Summary(num_steps, len(gradients), shares, seconds, overlaps)


def _reduction(step: Sequence[Way]) -> tuple[float, float]:
    """Return the seconds of a step in which a gradient is reduced, and their share before the last one is ready.

    Fused gradients are reduced at the same time, which counts once.
    """
    intervals = union(interval for way in step for interval in way.stages["reduction"])
    last = max(way.start for way in step)
    seconds = sum(end - start for start, end in intervals) / 1e6
    before = sum(max(0.0, min(end, last) - start) for start, end in intervals) / 1e6
    return seconds, before / seconds if seconds else 0.0


def _share(step: Sequence[Way], stage: str) -> float:
    length = sum((way.end - way.start) / 1e6 for way in step)
    return sum(way.seconds(stage) for way in step) / length if length else 0.0
