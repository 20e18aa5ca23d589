"""The benchmark of strategies: hand-computed figures, and a real run of every hand-written script."""

from __future__ import annotations

import json

import pytest

from allstep.benchmarks import strategies
from allstep.common.catalog.strategies import STRATEGIES

PHASES = [(framework, strategy) for framework in STRATEGIES for strategy in STRATEGIES[framework]]


def test_figures_are_ratios_within_rounds():
    rates = {
        "horovod ours": [100.0, 50.0, 90.0],
        "horovod by hand": [100.0, 100.0, 100.0],
        "ddp ours": [80.0, 50.0, 100.0],
        "ddp by hand": [80.0, 40.0, 125.0],
        "ddp ours compiled": [160.0, 90.0, 200.0],
        "ddp by hand compiled": [200.0, 100.0, 200.0],
    }
    rows = strategies.figures("pytorch", ["horovod", "ddp"], rates)
    assert [(row.what, row.ratio, row.reached) for row in rows] == [
        ("pytorch: horovod / by hand", 0.9, False),
        ("pytorch: ddp / by hand", 1.0, True),
        ("pytorch: ddp --compile / by hand", 0.9, False),
        ("pytorch: ddp --compile / without", 2.0, True),
        ("pytorch: horovod / ddp", 1.0, True),
    ]


@pytest.mark.parametrize(("framework", "strategy"), PHASES)
def test_every_strategy_has_a_script_beside_it(framework, strategy, tmp_path):
    commands = strategies.handwritten(framework, strategy, tmp_path / "output")
    assert len(commands) == {"multi-worker-mirrored": 2, "parameter-server": 3}.get(strategy, 1)
    assert all(f"allstep.benchmarks.handwritten.{framework}_" in " ".join(command) for command in commands)


@pytest.mark.full
@pytest.mark.parametrize(("framework", "strategy"), PHASES)
def test_the_scripts_train(framework, strategy, tmp_path, monkeypatch):
    """Oracle: the loss falls."""
    monkeypatch.setattr(strategies, "_NUM_SAMPLES", 1280)
    monkeypatch.setattr(strategies, "NUM_EPOCHS", 1)
    output = tmp_path / "output"
    strategies.run(*strategies.handwritten(framework, strategy, output))
    losses = json.loads(output.read_text())["losses"]
    assert len(losses) in (10, 20) and losses[-1] < losses[0]
