"""Cores and memory of this process, its host, and settings by which malloc keeps the large blocks of each step."""

import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

# Constants of glibc's malloc.h. glibc accepts no higher threshold for blocks that are mapped one by one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_KEPT_BYTES = 512 * 2**20
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def keep_freed_memory() -> None:
    """Make malloc reuse freed blocks instead of returning each to the kernel, for the rest of the process.

    glibc maps and unmaps each large block (an activation, a gradient) separately until a threshold that it adapts has
    grown; until then, each page of the block faults in every step. Setting the threshold also ends its adaptation, so
    the speed no longer depends on earlier frees. Both frameworks take CPU memory from malloc. On 2 cores, the CNN of
    `benchmarks/overhead.py` became 1.25 to 1.3 times as fast in PyTorch. In TensorFlow, under Horovod, it became
    2 % faster, and the spread between launches, whose numbers of faults differ, fell from 4.6 % to 1.6 %.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def host_name() -> str:
    """Return this host's name as one word of a message, a line or a file name; the name itself may be any bytes."""
    return re.sub(r"[^\w.:-]", "_", socket.gethostname()) or "unnamed"


def available_memory() -> int:
    """Return the bytes that this process can allocate without swapping or being killed.

    This is the available memory of the host (MemAvailable of proc(5)), or less if a container or a batch system limits
    it (memory.max of a version 2 control group, whose file cache counts as available because it can be dropped).
    """
    free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert free  # since Linux 3.14
    left = int(free[1]) * 1024
    own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return min([left, *left_in_control_groups(_CONTROL_GROUPS, own[1] if own else "")])


def left_in_control_groups(root: Path, group: str) -> Iterator[int]:
    """Yield the bytes left of each limit on `group`: its own limit and those of its parent groups."""
    for directory in (root / group, *(root / group).parents):
        with contextlib.suppress(OSError, ValueError):  # the group has no limit, or the limit is the word "max"
            maximum = int((directory / "memory.max").read_text())
            used = int((directory / "memory.current").read_text())
            cache = re.search(r"^inactive_file (\d+)$", (directory / "memory.stat").read_text(), re.MULTILINE)
            yield max(0, maximum - used + int(cache[1] if cache else 0))
        if directory == root:
            return


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    These are the cores of its affinity, or fewer if its control group has a quota of CPU time.
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = _CONTROL_GROUPS, membership: Path = Path("/proc/self/cgroup")) -> float | None:
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
    """Return the quota of a control group in cores, its share of each period; None without a quota."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError):
            text = " ".join((group / name).read_text() for name in names)
            if match := re.fullmatch(r"(\d+)\s+(\d+)\s*", text):  # not max, nor -1
                return int(match[1]) / max(1, int(match[2]))
    return None
