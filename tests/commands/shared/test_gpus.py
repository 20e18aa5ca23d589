"""Readings of NVML. Oracles: nvidia-smi where there is a GPU, and no readings where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import gpus
import pytest

from allstep.commands.shared import machine

SMI = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")
MEASURE = """
import time, torch
from allstep.commands.shared import machine
joules = machine.energy_counter(0)
a, before, started = torch.ones(8192, 8192, device="cuda"), joules(), time.perf_counter()
while time.perf_counter() - started < 1:
    (a @ a).sum().item()
print(joules() - before)
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver")
def test_without_a_driver_nothing_is_known():
    assert machine.free_gpu_memory() == () and machine.num_visible_gpus() == 0


@pytest.mark.gpu
def test_free_memory_is_that_of_nvidia_smi():
    gpus.need()
    expected = [int(line) * 2**20 for line in subprocess.check_output(SMI, text=True).split()]
    assert machine.free_gpu_memory() == pytest.approx(expected, rel=0.02)


@pytest.mark.gpu
def test_gpus_that_are_hidden_are_not_counted():
    count = [sys.executable, "-c", "from allstep.commands.shared import machine; print(machine.num_visible_gpus())"]
    for visible, expected in ((gpus.need(), "1"), ({"CUDA_VISIBLE_DEVICES": ""}, "0")):
        assert subprocess.check_output(count, env=os.environ | visible, text=True).strip() == expected


@pytest.mark.gpu
def test_a_busy_gpu_takes_energy():
    environ = os.environ | gpus.need()
    found = subprocess.run([sys.executable, "-c", MEASURE], env=environ, capture_output=True, text=True, check=True)
    assert 50 < float(found.stdout) < 2000  # joules of one second at 50 to 2,000 W
