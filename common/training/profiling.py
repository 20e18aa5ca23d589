"""Profiles of some steps (--profile): a Chrome trace of each rank, the costliest operators, and shares of the time."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from allstep.common.base.errors import UserError, note, summary, warn
from allstep.common.config.train_config import TrainConfig
from allstep.common.files.disk import write_atomically
from allstep.common.launch.placement import Placement
from allstep.common.training.hooks import Hook

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

Interval = tuple[float, float]
FOLDER = "profile"
FORMAT, VERSION = "allstep-profile", 1
_STEP, _BETWEEN = "allstep: step", "allstep: between steps"
WAIT = "allstep: wait for gradients"
"""Name of a span in which a rank waits for the gradients of others."""
_NUM_OPERATORS = 10
_COMMUNICATES = re.compile(
    rf"{WAIT}|all_?-?reduce|all_?gather|reduce_?scatter|all_?to_?all|^nccl|^c10d::|^gloo:|horovod|^Collective",
    re.IGNORECASE,
)


class Profiler(Protocol):
    """Profiler of a framework; `pytorch/profiler.py` and `tensorflow/profiler.py` have one each."""

    suffix: str
    """Suffix of the Chrome trace's file."""

    def start(self, session: TrainingRun, folder: Path) -> None:
        """Begin to record; files of the framework's own form go to `folder`."""
        ...

    def stop(self) -> None:
        """Wait for the device, and end the recording."""
        ...

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is in the trace under this name."""
        ...

    def events(self, path: Path) -> Sequence[Mapping[str, Any]]:
        """Write the Chrome trace, packed by gzip, to `path`, and return its events."""
        ...


def hooks_of(config: TrainConfig, placement: Placement, framework: str) -> Sequence[Hook]:
    """Return the hook of --profile on the ranks that it names, none without it; refuse ranks that do not exist."""
    output = config.output
    if output.profile is None:
        return ()
    if output.profile_ranks and max(output.profile_ranks) >= placement.world_size:
        raise UserError(
            f"expected --profile-ranks to be 0 to {placement.world_size - 1}, received {max(output.profile_ranks)}"
        )
    if output.profile_ranks and placement.rank not in output.profile_ranks:
        return ()
    assert output.output_dir is not None  # `validate` asks for one
    profiler = importlib.import_module(f"allstep.{framework}.profiler").Profiler()
    return (Profiling(profiler, output.profile, output.output_dir / FOLDER, placement.rank),)


class Profiling(Hook):
    """Records steps by a profiler, and writes what comes of it while training goes on."""

    def __init__(self, profiler: Profiler, steps: str, folder: Path, rank: int) -> None:
        """Prepare to record `steps`, FIRST:LAST, both included."""
        self._first, self._last = map(int, steps.split(":"))
        self._profiler, self._folder, self._rank = profiler, folder, rank
        self._records = False
        self._between: ExitStack | None = None
        """Span that ends when the next step begins; None when nothing is recorded."""
        self._writer: threading.Thread | None = None
        self._begun = self._first

    def on_end(self, session: TrainingRun) -> None:
        if self._between is not None:
            self._finish(session)
        elif self._records and self._writer is None:
            self._profiler.stop()
        if self._writer is not None:
            self._writer.join()
        elif self._rank == 0:
            warn(f"the run has no step {self._first} to {self._last}, which --profile names; nothing is profiled")

    def on_step(self, session: TrainingRun) -> None:
        """Start, go on or finish after a step.

        The profiler starts a step earlier, if there is one, in which ranks wait for the one whose profiler starts last.
        """
        step = session.progress.step
        if step >= self._last:
            if self._between is not None:
                self._finish(session)
            return
        if step >= self._first - 2 and not self._records:
            self._records = True
            self._profiler.start(session, self._folder / f"rank-{self._rank}")
        if step >= self._first - 1:
            if self._between is None:
                self._begun = step + 1
                self._restore = patched(session.worker, "train_step", self._recorded)
            self._between = ExitStack()
            self._between.enter_context(self._profiler.span(_BETWEEN))

    on_start = on_step

    def _recorded(self, train_step: Callable) -> Callable:
        def recorded(*arguments: Any) -> Any:
            assert self._between is not None
            self._between.close()
            with self._profiler.span(_STEP):
                return train_step(*arguments)

        return recorded

    def _finish(self, session: TrainingRun) -> None:
        assert self._between is not None
        self._between.close()
        self._between = None
        self._restore()
        self._folder.mkdir(parents=True, exist_ok=True)  # rank 0 has moved an earlier run out of the way
        self._profiler.stop()
        # Other ranks that are not profiled do not wait for the files.
        self._writer = threading.Thread(target=self._write, args=(session.progress.step,), name="profile")
        self._writer.start()

    def _write(self, last: int) -> None:
        path = self._folder / f"rank-{self._rank}{self._profiler.suffix}"
        try:
            found = summarise(self._profiler.events(path))
            content = {"format": FORMAT, "version": VERSION, "rank": self._rank, "first_step": self._begun}
            with write_atomically(self._folder / f"rank-{self._rank}.json") as stream:
                stream.write(json.dumps({**content, "last_step": last, **found}, indent=1).encode())
        except Exception as error:  # training does not depend on it
            warn(f"the profile of rank {self._rank} is not written: {summary(error)}")
            return
        if self._rank == 0:
            steps = f"steps {self._begun} to {last}"
            note(f"{steps} are profiled in {self._folder}; open {path.name} in Perfetto")


def summarise(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the costliest operators of a Chrome trace, and the shares of its time.

    `input` is the time between steps; `communication` that in which a collective is under way or waited for within
    steps, on a CPU or GPU; `compute` what is left of the steps. Times are in seconds, those of operators without what
    these call.
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] == _STEP]
    between = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["name"] == _BETWEEN]
    if not steps:
        raise ValueError("there is no step in the trace")
    talking = [(one["ts"], one["ts"] + one["dur"]) for one in spans if _COMMUNICATES.search(one["name"])]
    seconds = {"input": length(between), "communication": length(_within(talking, steps)), "steps": length(steps)}
    total = seconds["input"] + seconds["steps"]
    recorded = min(begin for begin, _ in steps + between), max(end for _, end in steps + between)
    operators = _self_times(
        [one for one in spans if one.get("cat") in ("cpu_op", "kernel") and recorded[0] <= one["ts"] < recorded[1]]
    )
    device = {name: found for name, found in operators.items() if found["kind"] == "kernel"}
    ranked = sorted((device or operators).items(), key=lambda item: -item[1]["seconds"])[:_NUM_OPERATORS]
    return {
        "seconds": total / 1e6,
        "input": seconds["input"] / total,
        "communication": seconds["communication"] / total,
        "compute": (seconds["steps"] - seconds["communication"]) / total,
        "operators": [
            {"name": name, "calls": found["calls"], "seconds": found["seconds"] / 1e6} for name, found in ranked
        ],
    }


def _self_times(spans: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return calls and time of each operator by name; a call within another counts for itself alone."""
    threads: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for span in spans:
        threads[span.get("pid"), span.get("tid")].append(span)
    found: dict[str, dict[str, Any]] = {}
    for thread in threads.values():
        open_spans: list[tuple[float, str]] = []
        for span in sorted(thread, key=lambda one: (one["ts"], -one["dur"])):
            while open_spans and open_spans[-1][0] <= span["ts"]:
                open_spans.pop()
            if open_spans:
                found[open_spans[-1][1]]["seconds"] -= span["dur"]
            entry = found.setdefault(span["name"], {"calls": 0, "seconds": 0.0, "kind": span["cat"]})
            entry["calls"] += 1
            entry["seconds"] += span["dur"]
            open_spans.append((span["ts"] + span["dur"], span["name"]))
    return found


def _within(intervals: Iterable[Interval], bounds: Sequence[Interval]) -> list[Interval]:
    clipped = [(max(a, begin), min(b, end)) for a, b in intervals for begin, end in bounds]
    return [(a, b) for a, b in clipped if a < b]


def write_trace(path: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Write a Chrome trace, packed by gzip."""
    with write_atomically(path) as stream, gzip.open(stream, "wt") as packed:
        json.dump({"traceEvents": events}, packed)


def patched(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> Callable[[], None]:
    """Wrap a method of an object, and return what takes the wrapper away."""
    setattr(owner, name, wrap(getattr(owner, name)))
    return lambda: delattr(owner, name)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that overlap or touch; the result is sorted."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    return sum(end - start for start, end in union(intervals))
