"""Damaged, hostile and invalid results and timelines. Oracle: the contract of mistakes, in `mistake.check`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_files import a_socket, endless, sparse
from mistake import Mistake, check_call
from reported import EPOCHS, START, collectives_result, compare_result, statistics

TIMELINE = "allstep timeline {here}/timeline.json"
RUN = "allstep forecast --run {here}"
LINK = "allstep forecast --step-ms 1 --collectives {here}/collectives.json"
REPEATED = "benchmarks.reproducibility {here} {here}"
VALIDATE = "allstep forecast --validate --measured {here} --collectives {here}/collectives.json"


def a_file(name: str, content: Callable[[Path], object] | str | bytes | dict | list) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        if callable(content):
            content(folder / name)
        elif isinstance(content, (str, bytes)):
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            (folder / name).write_text(json.dumps(content))

    return prepare


def timeline(expected: str, received: str, content: object) -> Mistake:
    return Mistake(TIMELINE, expected, received, prepare=a_file("timeline.json", content))


def run(expected: str, received: str, *events: object) -> Mistake:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    return Mistake(RUN, expected, received, prepare=a_file("metrics.jsonl", lines))


def link(expected: str, received: str, **changes: object) -> Mistake:
    content = {**collectives_result(), **changes}
    return Mistake(LINK, expected, received, prepare=a_file("collectives.json", content))


def compared(expected: str, received: str, **changes: object) -> Mistake:
    content = compare_result()
    content["cells"][0] |= changes
    return Mistake(REPEATED, expected, received, prepare=a_file("compare.json", content))


BEGIN = {"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 1}
ONE_RANK = {**START, "world_size": 1, "parameter_count": 10}
A_TIMELINE, METRICS = "a Horovod timeline", "a training run's metrics.jsonl"
ROW, COMPARED = collectives_result()["rows"][0], compare_result()
MISTAKES = {
    "timeline a FIFO": timeline("a readable timeline", "a FIFO", os.mkfifo),
    "timeline a socket": timeline("a readable timeline", "a socket", a_socket),
    "timeline endless": timeline("a readable timeline", "a character device", endless),
    "timeline of 40 GB": timeline("a readable timeline", "40000000000", sparse),
    "timeline a folder": timeline("a readable timeline", "a directory", Path.mkdir),
    "timeline missing": timeline("a readable timeline", "No such file", lambda path: path.with_name("x").touch()),
    "timeline empty": timeline(A_TIMELINE, "Expecting value", ""),
    "timeline of bytes": timeline(A_TIMELINE, "codec can't decode", b"\xff\xfe\x00"),
    "timeline of text": timeline(A_TIMELINE, "in which", "hello"),
    "timeline an object": timeline(A_TIMELINE, "in which", {"traceEvents": []}),
    "timeline of numbers": timeline(A_TIMELINE, "to be an object, received 1", [1, 2]),
    "timeline nested": timeline(A_TIMELINE, "nested", "[" * 10**5),
    "timeline of many digits": timeline(A_TIMELINE, "digits", "[" + "1" * 6000 + "]"),
    "timeline of nothing": timeline("a Horovod timeline with all-reduces", "without any", []),
    "event without a time": timeline(A_TIMELINE, "have ts", [{"ph": "E", "pid": 1}]),
    "event of no time": timeline(A_TIMELINE, "event 1.ts", [BEGIN, {"ph": "E", "pid": 1, "ts": "now"}]),
    "event of the end of time": timeline(A_TIMELINE, "event 1.ts", [BEGIN, {"ph": "E", "pid": 1, "ts": 10**400}]),
    "event of NaN": timeline(A_TIMELINE, "numbers that JSON has", '[{"ph": "E", "pid": 1, "ts": NaN}]'),
    "event of a list": timeline(A_TIMELINE, "event 0.pid", [{**BEGIN, "pid": [1]}]),
    "event of codes": timeline(A_TIMELINE, r"'\x1b[2J'", [{**BEGIN, "ts": "\x1b[2J"}]),
    "phase a list": timeline(A_TIMELINE, "event 0.ph", [{"ph": []}]),
    "run a FIFO": Mistake(RUN, METRICS, "a FIFO", prepare=a_file("metrics.jsonl", os.mkfifo)),
    "run of 40 GB": Mistake(RUN, METRICS, "40000000000", prepare=a_file("metrics.jsonl", sparse)),
    "run of nothing": run(METRICS, "0 start events"),
    "run without ranks": run(METRICS, "to have world_size", {"event": "start"}),
    "run of half a rank": run(METRICS, "world_size", {**ONE_RANK, "world_size": 0.5}),
    "run without speed": run("an epoch at least", "0 epochs", ONE_RANK, EPOCHS[0]),
    "run at a standstill": run(METRICS, "from 1e-30", ONE_RANK, {**EPOCHS[0], "images_per_second": 0}),
    "run of numbers": run(METRICS, "events[0]", 1, 2),
    "link a FIFO": Mistake(LINK, "a readable", "a FIFO", prepare=a_file("collectives.json", os.mkfifo)),
    "link endless": Mistake(LINK, "a readable", "a character device", prepare=a_file("collectives.json", endless)),
    "link half-written": Mistake(LINK, "a readable", "brackets", prepare=a_file("collectives.json", '{"format": "al')),
    "link a list": Mistake(LINK, "allstep-collectives 2", "list", prepare=a_file("collectives.json", [])),
    "link of another kind": link("allstep-collectives 2", "allstep-predict", format="allstep-predict"),
    "link of a list": link("allstep-collectives 2", "[1]", format=[1]),
    "link of version 99": link("allstep-collectives 2", "99", version=99),
    "link of one rank": link("result.ranks", "1", ranks=1),
    "link of many ranks": link("result.ranks", "'2'", ranks="2"),
    "link of no rows": link("all-reduces of mpi4py", "none", rows=[]),
    "link of rows": link("result.rows to be a list", "{}", rows={}),
    "link of no time": link("average", "0", rows=[{**ROW, "seconds": {**ROW["seconds"], "average": 0}}]),
    "comparison a FIFO": Mistake(REPEATED, "a readable", "a FIFO", prepare=a_file("compare.json", os.mkfifo)),
    "comparison of no cells": Mistake(
        REPEATED,
        "result to have cells",
        "[",
        prepare=a_file("compare.json", {name: value for name, value in COMPARED.items() if name != "cells"}),
    ),
    "cell without a place": compared("cells[0].ranks", "None", ranks=None),
    "cell of no efficiency": compared("cells[0].efficiency", "7", efficiency=7),
    "cell of a share of text": compared(
        "independent.median", "'a'", efficiency={"independent": {**statistics(1.0), "median": "a"}}
    ),
    "cell against a list": compared("cells[0].against", "[]", against=[]),
    "key twice": Mistake(REPEATED, "a readable", "'a' twice", prepare=a_file("compare.json", '{"a": 1, "a": 2}')),
    "forecasts of nothing": Mistake(VALIDATE, "a readable", "No such file", prepare=lambda here: (here / "x").touch()),
    "forecasts without settings": Mistake(
        VALIDATE,
        "result to have settings",
        "[",
        prepare=a_file("compare.json", {name: value for name, value in COMPARED.items() if name != "settings"}),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_result_files(name, tmp_path, monkeypatch, capfd):
    """Run in this process; test_commands.py has processes that end with such a line and status 2."""
    check_call(MISTAKES[name], tmp_path, monkeypatch, capfd)
