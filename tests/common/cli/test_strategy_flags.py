"""Functions shared by both frameworks' strategies. Oracle: the stated range of versions, ignoring patch releases."""

from __future__ import annotations

import pytest

from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import check_version


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0a0+eb65b36.nv26.01", "2.14.1+cpu"])
def test_versions_in_the_range(version):
    check_version("torch", version, (2, 9), (2, 14))


@pytest.mark.parametrize("version", ["1.13.1", "2.8.0", "2.15.0.dev20261101", "3.0.0"])
def test_other_versions_are_refused(version):
    with pytest.raises(UserError, match=r"^expected torch 2\.9 to 2\.14, received .*; install one of these$"):
        check_version("torch", version, (2, 9), (2, 14))
