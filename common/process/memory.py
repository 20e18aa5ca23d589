"""Memory: how much is left, and an allocator that keeps the large blocks for which each step asks."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

# glibc's malloc.h. It accepts no higher threshold for blocks that are mapped one by one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_KEPT_BYTES = 512 * 2**20


def keep_freed_memory() -> None:
    """Have malloc reuse freed blocks instead of returning each to the kernel, for the rest of the process.

    glibc maps and unmaps every large block (an activation, a gradient) by itself until a threshold that it adapts has
    grown; each page of it then faults in every step. Setting the threshold also ends its adaptation, so that the speed
    no longer depends on what was freed before. Both frameworks take their CPU memory from malloc; on 2 cores the CNN of
    `benchmarks/proofs/overhead.py` became 1.25 to 1.3 times as fast in PyTorch. In TensorFlow, under Horovod, it became
    2 % faster, and its launches, each of which had its own number of faults, spread by 1.6 % where they had by 4.6 %.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def available_memory() -> int:
    """Bytes that this process can take without swapping, and without being killed for it.

    What the host has left (MemAvailable of proc(5)), or less where a container or a batch system limits it (memory.max
    of a control group, version 2; its cache of files counts as left, for it gives way).
    """
    free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert free  # since Linux 3.14
    left = int(free[1]) * 1024
    own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    return min([left, *left_in_control_groups(_CONTROL_GROUPS, own[1] if own else "")])


_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def left_in_control_groups(root: Path, group: str) -> Iterator[int]:
    """Bytes that are left of each limit that holds for `group`: its own and those of the groups around it."""
    for directory in (root / group, *(root / group).parents):
        with contextlib.suppress(OSError, ValueError):  # there is none here, or its limit is the word "max"
            most = int((directory / "memory.max").read_text())
            used = int((directory / "memory.current").read_text())
            cache = re.search(r"^inactive_file (\d+)$", (directory / "memory.stat").read_text(), re.MULTILINE)
            yield max(0, most - used + int(cache[1] if cache else 0))
        if directory == root:
            return
