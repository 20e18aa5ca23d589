"""The C library's allocator, told to keep the large blocks that training frees and asks for again in every step."""

from __future__ import annotations

import ctypes

# glibc's malloc.h. It accepts no higher threshold for blocks that are mapped one by one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_KEPT_BYTES = 512 * 2**20


def keep_freed_memory() -> None:
    """Have malloc reuse freed blocks instead of returning each to the kernel, for the rest of the process.

    glibc maps and unmaps every large block (an activation, a gradient) by itself until a threshold that it adapts has
    grown; each page of it then faults in every step. Setting the threshold also ends its adaptation, so that the speed
    no longer depends on what was freed before. Both frameworks take their CPU memory from malloc; on 2 cores the CNN of
    `benchmarks/overhead.py` became 1.25 to 1.3 times as fast in PyTorch. In TensorFlow, under Horovod, it became 2 %
    faster, and its launches, each of which had its own number of faults, spread by 1.6 % where they had by 4.6 %.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
