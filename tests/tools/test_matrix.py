"""The table of tested versions. Oracle: the page, of which one line may change, and figures as runs print them."""

from __future__ import annotations

import matrix
import pytest


def test_a_row_is_replaced_and_the_others_stay(tmp_path, monkeypatch):
    page = tmp_path / "matrix.md"
    page.write_text(matrix.TABLE.read_text())
    monkeypatch.setattr(matrix, "TABLE", page)
    before = page.read_text().splitlines()
    key, _ = matrix.read_table()[3]
    exact = tuple(version if version == "-" else f"{matrix.short((version,) * 3)[0]}.77" for version in key)
    matrix.write_row(exact, {"install": "yes", "MPI": "mpi-pytorch: status 1"})
    [(old, new)] = [pair for pair in zip(before, page.read_text().splitlines(), strict=True) if pair[0] != pair[1]]
    assert new.startswith(f"| {' | '.join(exact)} | yes | mpi-pytorch: status 1 | - | - | - | - | - | 2")
    assert matrix.short(matrix.read_table()[3][0]) == matrix.short(key)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Epoch =  2: ..., Validation Loss = 0.301, Validation Accuracy = 0.9", ""),
        ("Validation Loss = 0.301\nEpoch =  2: ..., Validation Loss = 0.310", "loss 0.31, not 0.3"),
        ("validation loss: 0.1, validation accuracy: 0.950", ""),
        ("validation loss: 0.9, validation accuracy: 0.750", "accuracy 0.750"),
        ("nothing", "accuracy not printed"),
    ],
)
def test_a_run_with_another_figure_has_failed(text, wrong):
    assert matrix.wrong_figure(text, [0.3]) == wrong
