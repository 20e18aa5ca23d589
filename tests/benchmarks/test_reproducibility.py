"""The comparison of two `allstep compare` results."""

from __future__ import annotations

import pytest
from compared import cell, comparison, estimate, result

from allstep.benchmarks import reproducibility
from allstep.commands.compare.records import SUMMARY, CellResult
from allstep.commands.shared.records import files
from allstep.common.base.errors import UserError


def a_cell(strategy: str, share: float, rival: str, ratio: float) -> CellResult:
    """Return a cell whose speed is `ratio` +- 2 % of its rival's."""
    efficiency = {"independent": estimate(share, 0.1 * share)}
    return result(cell(strategy=strategy), efficiency=efficiency, against={rival: estimate(ratio, 0.02)})


def cells(horovod: float, ddp: float) -> list[CellResult]:
    limit = result(cell(strategy="independent"), efficiency={"independent": estimate(1.0, 0.1)})
    return [limit, a_cell("horovod", horovod, "ddp", horovod / ddp), a_cell("ddp", ddp, "horovod", ddp / horovod)]


@pytest.mark.parametrize(
    ("first", "again", "holds", "printed"),
    [
        ((0.90, 0.80), (0.92, 0.79), True, "horovod > ddp; horovod > ddp"),
        ((0.90, 0.80), (0.92, 0.70), False, "horovod > ddp; horovod > ddp"),
        ((0.90, 0.89), (0.88, 0.89), True, "horovod ~ ddp; ddp ~ horovod"),
        ((0.90, 0.86), (0.88, 0.87), True, "horovod > ddp; horovod ~ ddp"),
        ((0.88, 0.85), (0.86, 0.88), False, "horovod > ddp; ddp > horovod"),
    ],
    ids=["same", "another share", "never distinguished", "distinguished once", "contradicted"],
)
def test_a_repetition_holds_within_five_percent_where_no_ranking_is_contradicted(
    tmp_path, capsys, first, again, holds, printed
):
    for name, shares in (("first", first), ("second", again)):
        files.write(tmp_path / name / SUMMARY, comparison(*cells(*shares)))
    with pytest.raises(SystemExit) as ended:
        reproducibility.main([str(tmp_path / "first"), str(tmp_path / "second")])
    assert ended.value.code == (0 if holds else 1)
    output = capsys.readouterr().out
    assert f"synthetic-weak.pytorch.cnn.64.float32.2 {printed} " in " ".join(output.split())
    assert output.count("known to +-10.0% here") == 2


def test_a_repetition_of_a_broken_comparison_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "compare.json").write_text('{"format": "allstep-compare", "ver')
    with pytest.raises(UserError, match="expected a readable allstep-compare file.*compare.json"):
        reproducibility.main([str(tmp_path), str(tmp_path)])
    assert capsys.readouterr().err == ""
