"""Quotas of control groups. Oracle: cgroup-v2.txt and sched-bwc.txt of the kernel's documentation."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from allstep.common.base import resources
from allstep.common.launch import placement


def quota_of(tmp_path, membership: str, **files: str) -> float | None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return resources.cpu_quota(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a__cpu.max": "200000 100000\n", "a__b__cpu.max": "max 100000\n"}, 2.0),
        ("0::/../../elsewhere\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {}, None),
        (
            "4:cpu,cpuacct:/\n0::/\n",
            {"cpu,cpuacct__cpu.cfs_quota_us": "-1\n", "cpu,cpuacct__cpu.cfs_period_us": "1\n"},
            None,
        ),
        ("4:cpu,cpuacct:/d/1\n", {"cpu__cpu.cfs_quota_us": "250000\n", "cpu__cpu.cfs_period_us": "100000\n"}, 2.5),
        ("7:cpuset:/\n", {"cpuset__cpu.cfs_quota_us": "1\n", "cpuset__cpu.cfs_period_us": "1\n"}, None),
    ],
)
def test_quota(membership, files, expected, tmp_path):
    assert quota_of(tmp_path, membership, **files) == expected


@pytest.mark.parametrize(
    ("quota", "ranks", "expected"), [(None, 2, 4), (0.5, 1, 1), (4.9, 1, 4), (4.0, 2, 2), (99.0, 2, 4)]
)
@pytest.mark.parametrize("bound", [False, True])
def test_threads_of_ranks(bound, quota, ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8 // ranks if bound else 8))
    for module in (resources, placement):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
    environ = {"OMPI_MCA_orte_bound_at_launch": "1"} if bound else {}
    here = replace(placement.ALONE, world_size=ranks, local_size=ranks)
    assert placement.cores_per_rank(here, environ) == expected
