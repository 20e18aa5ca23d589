"""Ranking of strategies, on made-up samples."""

from __future__ import annotations

import pytest
from compared import cell, estimate, made, output, result

from allstep.benchmarks.reproducibility import rankings
from allstep.commands.compare import samples, table
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.table import answers

RATES = {
    "independent": [100.0, 101.0, 99.0, 100.0, 100.0],
    "horovod": [90.0, 91.0, 89.0, 90.0, 90.0],
    "ddp": [91.0, 88.0, 92.0, 86.0, 89.0],
    "fsdp": [70.0, 73.0, 71.0, 69.0, 70.0],
}


def ranked(*names: str, num_rounds: int = 5, comparable: tuple[str, ...] = tuple(RATES)) -> list[CellResult]:
    cells = [cell(strategy=name) for name in ("independent", *names)]
    elsewhere = cell(strategy="fsdp", ranks=1)
    outcomes = {
        of.id: [made(of, number, output([100 / rate])) for number, rate in enumerate(RATES[of.strategy][:num_rounds])]
        for of in (*cells, elsewhere)
    }
    ids = {of.id for of in (*cells, elsewhere) if of.strategy in comparable}
    return [
        result(
            of,
            efficiency=samples.efficiency(of, outcomes, ids, first_framework="pytorch"),
            against=table.against(of, [*cells, elsewhere], outcomes, ids),
        )
        for of in cells
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("fsdp", "horovod", "ddp"), "horovod ~ ddp > fsdp"),
        (("fsdp", "horovod"), "horovod > fsdp"),
        (("ddp", "horovod"), "horovod ~ ddp"),
        (("ddp",), None),
    ],
    ids=str,
)
def test_strategies_are_ranked_as_far_as_they_are_known_to_differ(names, expected):
    found = rankings(ranked(*names))
    assert found == ({("synthetic-weak", "pytorch", "cnn", 64, "float32", 2): expected} if expected else {})


def test_a_single_round_tells_nothing_apart():
    assert list(rankings(ranked("horovod", "fsdp", num_rounds=1)).values()) == ["horovod ~ fsdp"]


def test_a_single_launch_has_no_interval_and_no_spread():
    few, many = (table.table_of([result(cell(), images_per_second=estimate(90.0, 2.0, num))]) for num in (1, 5))
    assert [few.rows[0][2:5], many.rows[0][2:5]] == [["90", "–", "–"], ["90", "90 ± 2", "2"]]


def test_rivals_are_those_of_the_same_place_that_may_be_compared():
    _, horovod, fsdp = ranked("horovod", "fsdp")
    assert horovod.against["fsdp"].median == pytest.approx(9 / 7)
    assert (list(horovod.against), list(fsdp.against)) == (["fsdp"], ["horovod"])
    limit, horovod, _ = ranked("horovod", "fsdp", comparable=("independent", "horovod"))
    assert (limit.against, horovod.against) == ({}, {})


def test_a_table_says_who_is_faster_by_how_much_and_what_is_unknown():
    assert answers(ranked("horovod", "fsdp")) == [
        "pytorch on 2 ranks: horovod is the fastest, 27.5% faster than fsdp (24.5% to 30.5%, 95%)."
    ]
    assert answers(ranked("horovod", "ddp", "fsdp")) == [
        "pytorch on 2 ranks: horovod and ddp are equally fast as far as is known: they differ by at most 5.0%; horovod "
        "is 27.5% faster than fsdp (24.5% to 30.5%, 95%)."
    ]
    assert answers(ranked("horovod", "fsdp", num_rounds=1)) == [
        "pytorch on 2 ranks: horovod and fsdp were measured too few times to say which is the fastest."
    ]
    assert answers(ranked("horovod")) == []


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (estimate(1.2, 0.1), "tensorflow is 20.0% faster than pytorch (1.10 to 1.30 times its speed, 95%)."),
        (estimate(0.8, 0.1), "tensorflow is 20.0% slower than pytorch (0.70 to 0.90 times its speed, 95%)."),
        (
            estimate(1.0, 0.1),
            "tensorflow and pytorch are equally fast as far as is known: tensorflow has 0.90 to 1.10 times the speed "
            "of pytorch.",
        ),
        (
            estimate(1.2, num=1),
            "tensorflow had 1.20 times the speed of pytorch in one measurement, which proves nothing.",
        ),
    ],
)
def test_frameworks_are_compared_by_the_strategies_that_both_have(ratio, expected):
    """Single processes of both are compared as well, but the sentence is about the strategy."""
    both = [
        result(cell(strategy=strategy, framework=framework), efficiency={"first_framework": ratio})
        for framework in ("pytorch", "tensorflow")
        for strategy in ("independent", "horovod")
    ]
    assert answers(both) == [f"horovod on 2 ranks: {expected}"]
    assert answers(both[::2]) == [f"independent on 2 ranks: {expected}"]
