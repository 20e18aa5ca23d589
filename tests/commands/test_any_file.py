"""Readers of result files and timelines return a value or raise a one-line UserError, whatever the file holds.

Oracle: the writers' files can be read; everything else raises only UserError.
"""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reported import (
    EPOCHS,
    START,
    collectives_result,
    compare_result,
    search_result,
    study_result,
    validation_result,
)

from allstep.benchmarks import reproducibility
from allstep.commands.compare.records import SUMMARY, ComparisonResult
from allstep.commands.forecast import measured_runs
from allstep.commands.report import command as report
from allstep.commands.report import sources
from allstep.commands.shared.records import files
from allstep.commands.timeline import command as timeline
from allstep.common.base.errors import UserError

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def changed(draw, real: object) -> object:
    """Draw a copy of a value in which some elements are replaced or removed."""
    value = copy.deepcopy(real)
    for _ in range(draw(st.integers(0, 2))):
        placement, depth = value, draw(st.integers(0, 4))
        for level in range(depth + 1):
            keys = list(placement) if isinstance(placement, dict) else list(range(len(placement)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if level == depth or not isinstance(placement[key], (dict, list)):
                if draw(st.booleans()):
                    placement[key] = draw(ANY)
                else:
                    del placement[key]
                break
            placement = placement[key]
    return value


def written(real: object) -> st.SearchStrategy[bytes]:
    """Draw the real file, changed copies, prefixes of it, or arbitrary bytes."""
    text = json.dumps(real).encode()
    pieces = st.integers(0, len(text)).map(lambda end: text[:end])
    return changed(real).map(lambda value: json.dumps(value).encode()) | pieces | st.binary(max_size=40)


def event(kind: str, name: str, pid: int, ts: int) -> dict:
    return {"ph": kind, "name": name, "pid": pid, "ts": ts}


EVENTS = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "fc1.weight"}}]
for since in (0, 100):
    EVENTS += [event("B", "ALLREDUCE", 1, since), event("B", "MPI_ALLREDUCE", 1, since + 10)]
    EVENTS += [event("E", "", 1, since + 30), event("E", "", 1, since + 40)]


@SETTINGS
@given(written(EVENTS))
def test_any_timeline(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "timeline.json"
    path.write_bytes(data)
    try:
        timeline.summary(timeline.read_ways(path))
    except UserError as error:
        assert "expected " in str(error) and "received " in str(error) and "\n" not in str(error)


@SETTINGS
@given(written(compare_result()))
def test_any_comparison(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("any")
    (directory / SUMMARY).write_bytes(data)
    with contextlib.suppress(UserError):
        cells = files.read_input(ComparisonResult, directory / SUMMARY).cells
        reproducibility.rankings(cells)
        reproducibility.resolution(cells)
        reproducibility.contradicted(cells, cells)
    with contextlib.suppress(UserError):
        measured_runs.check_compare(directory, [])


@SETTINGS
@given(written(collectives_result()))
def test_any_collectives(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "collectives.json"
    path.write_bytes(data)
    with contextlib.suppress(UserError):
        _, link = measured_runs.read_link(path)
        assert link.latency > 0 and link.bandwidth > 0


LINES = [START | {"world_size": 1, "parameter_count": 3}, *({**epoch, "images_per_second": 9.0} for epoch in EPOCHS)]


@SETTINGS
@given(st.lists(written(LINES[0]) | written(LINES[1]), max_size=4).map(b"\n".join))
def test_any_run(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("any")
    (directory / "metrics.jsonl").write_bytes(data)
    with contextlib.suppress(UserError):
        measured_runs.read_run(directory)
    assert len(sources.read([directory])) in (0, 1)


@pytest.mark.parametrize(
    ("name", "real"),
    [
        ("compare.json", compare_result()),
        ("collectives.json", collectives_result()),
        ("validation.json", validation_result()),
        ("study.json", study_result()),
        ("lr.trials.json", search_result()),
    ],
)
def test_any_result_is_reported_or_left_out(tmp_path_factory, name, real):
    """The sections use no `except`: content that passes the shape check has every field that they read."""

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(written(real))
    def check(data: bytes) -> None:
        directory = tmp_path_factory.mktemp("any")
        (directory / name).write_bytes(data)
        found = sources.read([directory])
        assert len(found) + len(found.problems) == 1
        sections = report.build(found)
        if sections:
            report.render("report.md", "any", sections, found.problems)

    check()
