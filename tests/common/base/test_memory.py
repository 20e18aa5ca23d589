"""Freed memory stays with the process: its pages fault once, not in every step."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from importlib import import_module
from allstep.common.config.train_config import StrategyConfig
from allstep.common.launch.placement import find_placement
from allstep.common.process.lean_import import lean_import
from allstep.common.base.resources import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
elif sys.argv[1] != "default":
    module, strategy = sys.argv[1].split(":")
    with lean_import():
        strategies = import_module(module)
    getattr(strategies, strategy)(find_placement(), StrategyConfig()).pin_device()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(10):
    blocks = [libc.malloc(2**24) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 2**24)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

PAGES_A_STEP = 4 * 2**24 // 4096


def faults(mode: str) -> int:
    """Return the page faults of a process that uses and frees the same 64 MiB in each of 10 steps."""
    return int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_used_again():
    assert faults("kept") < 2 * PAGES_A_STEP


def test_the_default_faults_in_every_step():
    assert faults("default") > 9 * PAGES_A_STEP


@pytest.mark.parametrize("strategy", ["pytorch.strategies.strategy", "tensorflow.strategies.strategy"])
def test_a_rank_uses_freed_memory_again(strategy):
    assert faults(f"allstep.{strategy}:Single") < 2 * PAGES_A_STEP


def test_a_rank_of_several_devices_uses_freed_memory_again():
    assert faults("allstep.tensorflow.strategies.distribute:Mirrored") < 2 * PAGES_A_STEP
