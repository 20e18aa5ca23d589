"""Outputs of the tutorial's commands that need two hosts or Slurm. Oracle: the page."""

from __future__ import annotations

import importlib

import pytest
from cluster import bed
from ranks import REPOSITORY
from requirements import need

pytestmark = pytest.mark.cold

need("slurmctld", "slurmd", "sbatch", "munged", "setpriv")


@pytest.mark.full
@pytest.mark.launch
def test_outputs_on_hosts_are_those_of_the_page(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs" / "site")
    outputs = importlib.import_module("outputs")
    assert outputs.TWO_HOSTS[0] == str(bed.TWO_HOSTS)
    page = (REPOSITORY / "docs" / "tutorial" / "two-hosts.md").read_text()
    assert len(list(outputs.blocks(page, hosts=True))) == 3
    assert list(outputs.differences(page, outputs.checkout(tmp_path), hosts=True)) == []
