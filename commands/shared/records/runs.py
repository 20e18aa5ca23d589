"""Training runs as recorded in metrics.jsonl, one event per line, and in the profiles of --profile."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from allstep.common.files import strict_json
from allstep.common.files.disk import read_regular
from allstep.common.files.strict_json import Count, NonNegative, NotJson, Positive, from_json, mapping

FILE = "metrics.jsonl"
_LARGEST_FILE = 64 * 2**20  # enough lines for half a million steps


@dataclass(frozen=True)
class Start:
    """The event at the start of a run."""

    world_size: Count
    global_batch_size: Count
    framework: str
    strategy: str
    launcher: str | None = None
    parameter_count: Count | None = None
    local_size: Count | None = None
    """Ranks on the host of rank 0."""
    device: str | None = None
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """The event after a step."""

    step: Count
    loss: float


@dataclass(frozen=True)
class Epoch:
    """The event after an epoch."""

    epoch: float
    train_loss: float
    cumulative_seconds: float
    validation_accuracy: float | None = None
    """None without classes."""
    images_per_second: Positive | None = None
    gradient_noise_scale: NonNegative | None = None
    validation_confusion_matrix: tuple[tuple[int, ...], ...] = ()
    validation_precision_per_class: tuple[NonNegative, ...] = ()
    validation_recall_per_class: tuple[NonNegative, ...] = ()
    validation_f1_per_class: tuple[NonNegative, ...] = ()


@dataclass(frozen=True)
class End:
    """The event at the end of a run."""

    peak_memory_bytes: NonNegative | None = None
    weights_checksum: str | None = None


@dataclass(frozen=True)
class Events:
    """Contents of metrics.jsonl, by event, in order."""

    starts: tuple[Start, ...]
    steps: tuple[Step, ...]
    epochs: tuple[Epoch, ...]
    ends: tuple[End, ...]
    num_broken: int
    """Number of lines that are no JSON: the last line is incomplete if the run was killed or still writes."""


@dataclass(frozen=True)
class _Event:
    event: str


_BROKEN = object()
_KINDS = {"start": Start, "step": Step, "epoch": Epoch, "end": End}


def read_events(path: Path, redact: Callable[[Any], Any] | None = None) -> Events:
    """Read the events of a run; `redact` hides secrets in a line's JSON.

    Raises OSError if the file cannot be read, Mismatch if a line is no event, or lacks a field.
    """
    found: dict[str, list[Any]] = {name: [] for name in _KINDS}
    lines = _lines(path)
    for number, content in enumerate(lines):
        if content is not _BROKEN:
            name = from_json(_Event, content, f"events[{number}]").event
            if name in _KINDS:
                found[name].append(from_json(_KINDS[name], redact(content) if redact else content, name))
    starts, steps, epochs, ends = map(tuple, found.values())
    return Events(starts, steps, epochs, ends, lines.count(_BROKEN))


def read_points(path: Path, names: Collection[str]) -> tuple[dict[str, float], ...]:
    """Read the numbers with these names from each event; leave out events without any.

    Raises OSError if the file cannot be read, Mismatch if a line is no JSON object.
    """
    found = []
    for number, content in enumerate(_lines(path)):
        if content is not _BROKEN:
            mapping(content, f"events[{number}]")
            found.append({name: float(content[name]) for name in names if type(content.get(name)) in (int, float)})
    return tuple(filter(None, found))


def _lines(path: Path) -> list[Any]:
    """Return the JSON of each line; _BROKEN for one that has none, as the last one of a run that was killed."""
    found = []
    for line in read_regular(path, maximum=_LARGEST_FILE).splitlines():
        try:
            found.append(strict_json.loads(line))
        except NotJson:
            found.append(_BROKEN)
    return found


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Operator of the framework, or kernel of a GPU."""

    name: str
    calls: Count
    seconds: float
    """Time in all calls, without what they call."""


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """Contents of profile/rank-N.json, which `common.training.profiling` writes."""

    FORMAT: ClassVar[str] = "allstep-profile"
    VERSION: ClassVar[int] = 1

    rank: int
    first_step: int
    last_step: int
    seconds: Positive
    """Length of the profiled steps and the time between them."""
    input: NonNegative
    """Share of the time between steps."""
    communication: NonNegative
    """Share of the time in which a collective is under way or waited for within steps."""
    compute: NonNegative
    """Share that is left."""
    operators: tuple[Operator, ...]
    """Costliest operators first."""
