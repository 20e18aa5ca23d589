"""Two comparisons beside each other."""

from __future__ import annotations

import pytest

from allstep.benchmarks import repeated
from allstep.benchmarks.comparison import results
from allstep.common.errors import UserError


def a_cell(strategy: str, share: float) -> dict:
    place = {"workload": "synthetic-weak", "framework": "pytorch", "model": "cnn", "batch_size": 64, "ranks": 2}
    efficiency = {"independent": {"num": 5, "median": share, "mean": share, "high": 1.1 * share}}
    return {"id": f"{strategy}.2", "strategy": strategy, "precision": "float32", "efficiency": efficiency, **place}


@pytest.mark.parametrize(
    ("again", "holds"), [((0.92, 0.84), True), ((0.92, 0.70), False), ((0.86, 0.87), False)], ids=str
)
def test_a_repeated_comparison_holds_within_five_percent_and_in_the_same_order(
    tmp_path, monkeypatch, capsys, again, holds
):
    for name, shares in (("first", (0.9, 0.85)), ("second", again)):
        cells = [a_cell(*one) for one in zip(("horovod", "ddp"), shares, strict=True)]
        limit = {**a_cell("independent", 1.0), "id": "independent.2"}
        results.write(tmp_path / name / results.SUMMARY, {"cells": [limit, *cells]})
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path / "first"), str(tmp_path / "second")])
    with pytest.raises(SystemExit) as ended:
        repeated.main()
    assert ended.value.code == (0 if holds else 1)
    assert capsys.readouterr().out.count("known to +-10.0% here") == 2


def test_a_repetition_of_a_broken_comparison_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "compare.json").write_text('{"format": "allstep-compare", "ver')
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path), str(tmp_path)])
    with pytest.raises(UserError, match="expected a readable allstep-compare file.*compare.json"):
        repeated.main()
    assert capsys.readouterr().err == ""
