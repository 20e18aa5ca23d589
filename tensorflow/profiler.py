"""The profiler of --profile: TensorFlow's. `pytorch/profiler.py` is the same for PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from allstep.common.training.profiling import write_trace

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun


class Profiler:
    """Records operators of the CPU and kernels of the GPU; see `common.training.profiling.Profiler`."""

    suffix = ".trace.json.gz"

    def start(self, session: TrainingRun, folder: Path) -> None:
        self._folder = folder  # TensorBoard reads it
        tf.profiler.experimental.start(str(folder))

    def stop(self) -> None:
        tf.profiler.experimental.stop()

    def span(self, name: str) -> AbstractContextManager:
        return tf.profiler.experimental.Trace(name)

    def events(self, path: Path) -> Sequence[Mapping[str, Any]]:
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        space = xplane_pb2.XSpace()  # pyright: ignore[reportAttributeAccessIssue]
        recorded = max(self._folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        space.ParseFromString(recorded.read_bytes())
        events = [event for number, plane in enumerate(space.planes) for event in _events(plane, number)]
        write_trace(path, events)
        return events


def _events(plane: Any, pid: int) -> Iterator[Mapping[str, Any]]:
    """Yield a plane of TensorFlow's profile as events of a Chrome trace, in microseconds."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": plane.name}}
    is_device = plane.name.startswith("/device:")
    ends: list[tuple[Any, float, float]] = []
    for tid, line in enumerate(plane.lines):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": line.name}}
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            begin, duration = line.timestamp_ns / 1e3 + event.offset_ps / 1e6, event.duration_ps / 1e6
            if name.startswith(_ASYNCHRONOUS):
                ends.append((_key(plane, event), begin, begin + duration))
            # An operator of a graph is called NAME:KIND.
            kind = name.rpartition(":")[2] if ":" in name and "::" not in name and " " not in name else ""
            category = "kernel" if is_device else "cpu_op" if kind else "runtime"
            span = {"ph": "X", "cat": category, "name": kind or name, "pid": pid, "tid": tid}
            yield {**span, "ts": begin, "dur": duration, "args": {"name": name}}
    yield from _asynchronous(ends, pid, len(plane.lines))


_ASYNCHRONOUS = "ExecutorState::ProcessAsync::"
"""Beginning of the names of two events: an operator that computes elsewhere, as collectives do, starts and is done."""


def _key(plane: Any, event: Any) -> tuple[str, str, int]:
    """Return name and kind of an asynchronous operator, and the run of its graph."""
    stats = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}
    texts = [
        stat.str_value or plane.stat_metadata[stat.ref_value].name
        for stat in (stats.get("name"), stats.get("kernel_type"))
        if stat is not None
    ]
    step = stats.get("step_id")
    return (*(texts + ["", ""])[:2], (step.int64_value or step.uint64_value) if step is not None else 0)


def _asynchronous(ends: list[tuple[Any, float, float]], pid: int, first_tid: int) -> Iterator[Mapping[str, Any]]:
    """Yield a span from the start of each asynchronous operator until it is done, in a row for each operator."""
    found: dict[Any, list[float]] = {}
    for key, begin, end in ends:
        found.setdefault(key, []).extend((begin, end))
    rows = {name: first_tid + number for number, name in enumerate(dict.fromkeys(key[0] for key in found))}
    for (name, kind, _), times in found.items():
        span = {"ph": "X", "cat": "cpu_op", "name": kind, "pid": pid, "tid": rows[name], "args": {"name": name}}
        yield {**span, "ts": min(times), "dur": max(times) - min(times)}
