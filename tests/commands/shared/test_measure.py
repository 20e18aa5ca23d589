"""The pure functions of the benchmarks. Oracle: hand-computed medians, orders and verdicts."""

from __future__ import annotations

import json
import sys

import pytest
from reported import EPOCHS, START

from allstep.benchmarks.figures import largest_relative_difference, median_difference
from allstep.commands.shared.measure import BenchmarkFailed, epoch_rates, interleaved, median_ratio, run

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


def test_rates_leave_warmup_out(tmp_path):
    events = [START, *({**EPOCHS[0], "images_per_second": rate} for rate in (5.0, 7.0, 8.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert epoch_rates(tmp_path) == [7.0, 8.0]


def test_failed_job_shows_its_output():
    with pytest.raises(BenchmarkFailed, match="status 3(?s:.*)why"):
        run([sys.executable, "-c", "print('why'); raise SystemExit(3)"])
