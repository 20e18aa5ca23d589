"""Versions of frameworks. Oracle: the range that docs/installation.md promises, ignoring patch releases."""

from __future__ import annotations

import pytest

from allstep.common.base.errors import UserError
from allstep.common.launch.versions import check_version


@pytest.mark.parametrize("version", ["2.9.0", "2.11.0a0+eb65b36.nv26.01", "2.14.1+cpu"])
def test_tested_versions_pass_without_a_word(version, capsys):
    check_version("torch", version)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("version", ["1.13.1", "2.8.0"])
def test_older_versions_are_refused(version):
    with pytest.raises(UserError, match=r"^expected torch 2\.9 to 2\.14, received .*; install one of these$"):
        check_version("torch", version)


@pytest.mark.parametrize("version", ["2.15.0.dev20261101", "2.15.0+cu130", "3.0.0"])
def test_newer_versions_are_one_line_of_warning(version, capsys):
    check_version("torch", version)
    line = f"allstep: warning: torch {version} is newer than the tested versions, 2.9 to 2.14\n"
    assert capsys.readouterr().err == line


def test_other_ranks_do_not_warn(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    check_version("tensorflow", "2.22.0")
    assert capsys.readouterr().err == ""
