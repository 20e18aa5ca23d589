"""Two comparisons beside each other."""

from __future__ import annotations

import pytest

from allstep.benchmarks.comparison import results
from allstep.benchmarks.proofs import reproducibility
from allstep.common.process.errors import UserError


def a_cell(strategy: str, share: float, rival: str, ratio: float) -> dict:
    """A cell whose speed is `ratio` +- 2 % of its rival's."""
    place = {"workload": "synthetic-weak", "framework": "pytorch", "model": "cnn", "batch_size": 64, "ranks": 2}
    efficiency = {"independent": {"num": 5, "median": share, "mean": share, "high": 1.1 * share}}
    against = {rival: {"num": 5, "low": ratio - 0.02}}
    shared = {"precision": "float32", "efficiency": efficiency, "against": against}
    return {"id": f"{strategy}.2", "strategy": strategy, **shared, **place}


def cells(horovod: float, ddp: float) -> list[dict]:
    limit = {**a_cell("independent", 1.0, "none", 1.0), "id": "independent.2", "against": {}}
    return [limit, a_cell("horovod", horovod, "ddp", horovod / ddp), a_cell("ddp", ddp, "horovod", ddp / horovod)]


@pytest.mark.parametrize(
    ("first", "again", "holds", "told"),
    [
        ((0.90, 0.80), (0.92, 0.79), True, "horovod > ddp; horovod > ddp"),
        ((0.90, 0.80), (0.92, 0.70), False, "horovod > ddp; horovod > ddp"),
        ((0.90, 0.89), (0.88, 0.89), True, "horovod ~ ddp; ddp ~ horovod"),
        ((0.90, 0.86), (0.88, 0.87), True, "horovod > ddp; horovod ~ ddp"),
        ((0.88, 0.85), (0.86, 0.88), False, "horovod > ddp; ddp > horovod"),
    ],
    ids=["same", "another share", "never told apart", "told apart once", "contradicted"],
)
def test_a_repetition_holds_within_five_percent_where_no_ranking_is_contradicted(
    tmp_path, monkeypatch, capsys, first, again, holds, told
):
    for name, shares in (("first", first), ("second", again)):
        results.write(tmp_path / name / results.SUMMARY, {"cells": cells(*shares)})
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path / "first"), str(tmp_path / "second")])
    with pytest.raises(SystemExit) as ended:
        reproducibility.main()
    assert ended.value.code == (0 if holds else 1)
    printed = capsys.readouterr().out
    assert f"synthetic-weak.pytorch.cnn.64.float32.2 {told} " in " ".join(printed.split())
    assert printed.count("known to +-10.0% here") == 2


def test_a_repetition_of_a_broken_comparison_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "compare.json").write_text('{"format": "allstep-compare", "ver')
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path), str(tmp_path)])
    with pytest.raises(UserError, match="expected a readable allstep-compare file.*compare.json"):
        reproducibility.main()
    assert capsys.readouterr().err == ""
