"""Cores that this process may use: those of its affinity, or fewer if its control group has a quota of their time."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def usable_cores() -> int:
    """Return the number of cores for whose threads there is time, at least 1."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the smallest quota of this process's control groups, version 1 or 2, in cores; None without any.

    `root` is where control groups are mounted, `membership` the file that tells the groups of this process; in a
    container they may lie outside `root`.
    """
    quotas = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / controllers if (root / controllers).exists() else root / "cpu"
        for directory in (top / group.lstrip("/"), *(top / group.lstrip("/")).parents):
            quotas += [_quota(directory)]
            if directory == top:
                break
    return min((quota for quota in quotas if quota), default=None)


def _quota(group: Path) -> float | None:
    """Return the quota of a control group in cores: microseconds of each period."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            text = " ".join((group / name).read_text() for name in names)
            if match := re.fullmatch(r"(\d+)\s+(\d+)\s*", text):  # not max, nor -1
                return int(match[1]) / max(1, int(match[2]))
    return None
