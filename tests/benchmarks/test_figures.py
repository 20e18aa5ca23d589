"""Figures of benchmarks. Oracle: hand-computed differences, orders and verdicts."""

from __future__ import annotations

import json
import sys

import pytest

from allstep.benchmarks.figures import largest_relative_difference, print_table, save, seconds_until
from allstep.commands.shared.measure import BenchmarkFailed
from allstep.commands.shared.records.measured import Figure

pytestmark = pytest.mark.launch


def test_largest_relative_difference():
    assert largest_relative_difference([1, 2, 3.3], [1, 2.5, 3]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ratio", "target", "reached"),
    [
        (0.98, ">= 0.98", True),
        (0.979, ">= 0.98", False),
        (1.0, "<= 1.0", True),
        (1.1, "<= 1.0", False),
        (-0.3, "<= 1.0", True),
        (0.1, "", True),
        (float("nan"), ">= 0.98", False),
    ],
)
def test_verdict(ratio, target, reached):
    assert Figure("what", 1, 1, ratio, target).reached is reached


def test_table_and_file_say_the_same(tmp_path, capsys):
    figures = [
        Figure("long enough", 99, 100, 0.99, ">= 0.98"),
        Figure("missed", 1, 2, 0.5, ">= 0.98"),
        Figure("no target", 1, 2, 0.5, ""),
    ]
    print_table(figures)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["long", "enough", "99", "100", "0.99", ">=", "0.98", "yes"],
        ["missed", "1", "2", "0.5", ">=", "0.98", "NO"],
        ["no", "target", "1", "2", "0.5"],
    ]
    save(tmp_path / "new" / "out.json", figures, {"rates": [1.5]})
    content = json.loads((tmp_path / "new" / "out.json").read_text())
    assert [figure["what"] for figure in content["figures"]] == ["long enough", "missed", "no target"]
    assert [figure["reached"] for figure in content["figures"]] == [True, False, True]
    assert content["samples"] == {"rates": [1.5]}
    assert (content["format"], content["version"]) == ("allstep-benchmark", 1)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.json"]  # written atomically


def test_seconds_until_something_happens(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", f"open({str(done)!r}, 'w')"]
    assert seconds_until(command, done.exists) > 0
    with pytest.raises(BenchmarkFailed, match="without"):
        seconds_until(command, (tmp_path / "never").exists)
