"""The pure functions of the benchmarks. Oracle: hand-computed medians, orders and verdicts."""

from __future__ import annotations

import json
import sys

import pytest
from reported import EPOCHS, START

from allstep.commands.shared.measure import (
    BenchmarkFailed,
    epoch_rates,
    interleaved,
    largest_relative_difference,
    median_difference,
    median_ratio,
    print_table,
    run,
    save,
    seconds_until,
)
from allstep.commands.shared.records.measured import Figure

pytestmark = pytest.mark.launch


def test_interleaved_takes_turns():
    order = []

    def measure(name: str, value: float) -> float:
        order.append(name)
        return value + len(order)

    samples = interleaved({"a": lambda: measure("a", 0), "b": lambda: measure("b", 100)}, 3)
    assert order == ["a", "b"] * 3
    assert samples == {"a": [1, 3, 5], "b": [102, 104, 106]}


def test_medians_are_those_of_the_rounds():
    # Ratios 1, 1/2, 2 and differences 0, -2, 2; the ratio of the medians would be 3 / 2.
    ours, reference = [2, 2, 4], [2, 4, 2]
    assert median_ratio(ours, reference) == 1
    assert median_difference(ours, reference) == 0
    # One disturbed round of five does not count.
    assert median_ratio([99, 99, 10, 99, 99], [100] * 5) == 0.99


@pytest.mark.parametrize("function", [median_ratio, median_difference, largest_relative_difference])
def test_rounds_must_match(function):
    with pytest.raises(ValueError):
        function([1.0, 2.0], [1.0])


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


def test_rates_leave_warmup_out(tmp_path):
    events = [START, *({**EPOCHS[0], "images_per_second": rate} for rate in (5.0, 7.0, 8.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert epoch_rates(tmp_path) == [7.0, 8.0]


def test_failed_job_shows_its_output():
    with pytest.raises(BenchmarkFailed, match="status 3(?s:.*)why"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])


def test_seconds_until_something_happens(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", f"open({str(done)!r}, 'w')"]
    assert seconds_until(command, done.exists) > 0
    with pytest.raises(BenchmarkFailed, match="without"):
        seconds_until(command, (tmp_path / "never").exists)
