"""The targets of `benchmarks/slices.py`, whose measurements no test runs."""

from __future__ import annotations

import pytest

from allstep.benchmarks import slices
from allstep.common.catalog.strategies import FRAMEWORKS


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_that_is_measured_has_a_target(framework, tmp_path):
    measured = slices._sides(framework, (2, 4), slices.PARTS, tmp_path)
    of_pytorch_alone = {"fsdp"} if framework == "tensorflow" else set()
    assert {what.split()[0] for what in measured} == slices._TARGETS.keys() - of_pytorch_alone
