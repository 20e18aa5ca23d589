"""Flag types. Oracle: one rule for whole and other numbers, that of JSON and C."""

from __future__ import annotations

import argparse

import pytest

from allstep.common.base.flag_types import number, whole

KINDS = whole(-(10**9), 10**9), number(-1e9, 1e9)


@pytest.mark.parametrize("kind", KINDS, ids=["whole", "number"])
@pytest.mark.parametrize(
    "word", ["1_000", "٣", "１２", " 7", "7 ", "7\n", "", "+", "0x10", "1,5", "nan", "1e", "²", "--1"]
)
def test_neither_takes(word, kind):
    with pytest.raises(argparse.ArgumentTypeError, match="to be a (whole )?number, received"):
        kind(word)


@pytest.mark.parametrize("word", ["0", "-0", "+7", "007", "1000000", "-12"])
def test_both_take(word):
    assert [kind(word) for kind in KINDS] == [int(word)] * 2


@pytest.mark.parametrize("word", ["0.5", ".5", "5.", "1e-2", "-1E+3", "+2.5e2"])
def test_numbers(word):
    assert number(-1e9, 1e9)(word) == float(word)


@pytest.mark.parametrize("word", ["inf", "-inf", "infinity", "1e999999999", "9" * 400])
def test_infinities_are_out_of_range(word):
    with pytest.raises(argparse.ArgumentTypeError, match=r"to be at (least|most|minimum|maximum)"):
        number(-1e9, 1e9)(word)
