"""The quick forms of the benchmarks, with real launches. Oracle: the rows that issues 2 and 3 require."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from ranks import REPOSITORY, environment

from allstep.benchmarks.overhead import FULL_OR_QUICK, TrainerBench

pytestmark = pytest.mark.cold


def quick(benchmark: str, output, *flags: str) -> dict:
    """Run `python -m allstep.benchmarks.BENCHMARK --quick`, which exits with 1 if it misses a target."""
    command = [sys.executable, "-m", f"allstep.benchmarks.{benchmark}", "--quick", "--output", output, *flags]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stdout + result.stderr
    content = json.loads(output.read_text())
    assert all(figure["what"] in result.stdout for figure in content["figures"]), result.stdout
    return content


@pytest.mark.full
def test_overhead_rows(tmp_path):
    content = quick("overhead", tmp_path / "out.json", "--frameworks", "pytorch")
    assert {figure["what"]: figure["target"] for figure in content["figures"]} == {
        "pytorch: largest difference of losses": "<= 1e-4",
        "pytorch: difference of the mean loss": "<= 1e-4",
        "pytorch: images/s / hand-written": ">= 0.98",
        "pytorch: images/s by a Session": ">= 0.98",
        "pytorch: images/s / independent": ">= 0.93",
        "pytorch: seconds to first step, more than bare": "<= 1.0",
        "pytorch: replica check / 100 steps": "<= 0.01",
    }
    # The only figures that other load on the machine cannot spoil.
    assert all(figure["reached"] for figure in content["figures"][:2])
    rates = content["samples"]["pytorch"]["images_per_second"]
    assert {name: len(of_rounds) for name, of_rounds in rates.items()} == {
        "ours": 1,
        "handwritten": 1,
        "independent": 1,
        "session": 1,
    }
    assert all(figure["ours"] > 0 and figure["reference"] > 0 for figure in content["figures"])


@pytest.mark.full
@pytest.mark.launch
def test_handwritten_tensorflow_loop_trains_the_same(tmp_path):
    """Oracle: the curves of trainer and Session. The ratios would be worthless if the reference trained another."""
    figures = TrainerBench("tensorflow", FULL_OR_QUICK[True], tmp_path).loss_differences()
    assert all(figure.reached for figure in figures), figures
