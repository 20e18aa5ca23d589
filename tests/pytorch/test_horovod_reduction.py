"""Gradients that Horovod combines. Oracle: averages by hand, in the program."""

from __future__ import annotations

from ranks import REPOSITORY, launch


def test_sums_are_averages_of_what_each_rank_computes():
    result = launch("horovodrun-mpi", 2, REPOSITORY / "tests/pytorch/ranks/sums.py")
    assert result.returncode == 0, result.stderr
