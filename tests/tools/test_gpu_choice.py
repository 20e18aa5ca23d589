"""The choice of `make setup` to build for GPUs. Oracle: the table in docs/gpus.md."""

from __future__ import annotations

import pytest
from setup_needs import Choice, choose

from allstep.commands.horovod.prerequisites import Driver, find_driver, kernel_module_version
from allstep.common.base.errors import UserError

NONE, OLD, NEW, UNKNOWN = Driver(False), Driver(True, 570), Driver(True, 580), Driver(True)
OPEN_MODULE = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED_MODULE = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
GCC version:  gcc version 9.4.0 (Ubuntu 9.4.0-1ubuntu1~20.04.2)
"""


@pytest.mark.parametrize("driver", [NONE, OLD, NEW, UNKNOWN])
@pytest.mark.parametrize("before", [None, False, True])
@pytest.mark.parametrize("asked", ["0", "1"])
def test_what_was_asked_for_is_built(asked, before, driver):
    assert choose(asked, before=before, driver=driver) == Choice(asked == "1", f"GPU={asked} says so")


@pytest.mark.parametrize("driver", [NONE, OLD, NEW, UNKNOWN])
@pytest.mark.parametrize("before", [False, True])
def test_an_environment_stays_what_it_is(before, driver):
    """Otherwise a home that login nodes and GPU nodes share would be rebuilt at each change of node."""
    assert choose("", before=before, driver=driver).gpu is before


@pytest.mark.parametrize("driver, gpu", [(NONE, False), (OLD, False), (NEW, True), (UNKNOWN, True)])
def test_the_first_set_up_goes_by_the_driver(driver, gpu):
    assert choose("", before=None, driver=driver).gpu is gpu


def test_the_reason_says_what_would_change_it():
    assert "GPU=1" in choose("", before=None, driver=NONE).reason
    assert "GPU=0" in choose("", before=None, driver=NEW).reason
    assert "570" in choose("", before=None, driver=OLD).reason
    assert "GPU=1" in choose("", before=False, driver=NEW).reason
    assert "GPU=1" not in choose("", before=False, driver=NONE).reason


@pytest.mark.parametrize("asked", ["yes", "2", " 1"])
def test_another_value_is_refused(asked):
    with pytest.raises(UserError, match=f"received '{asked}'"):
        choose(asked, before=None, driver=NONE)


@pytest.mark.parametrize(
    "text, version", [(OPEN_MODULE, 580), (CLOSED_MODULE, 535), ("NVRM version: something else\n", None)]
)
def test_the_kernel_module_s_version(text, version):
    assert kernel_module_version(text) == version


def test_the_driver_is_found_by_its_kernel_module(tmp_path):
    folder = tmp_path / "proc" / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(CLOSED_MODULE)
    assert find_driver(tmp_path) == Driver(True, 535)


def test_the_driver_is_found_by_its_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    without = find_driver(tmp_path)
    tool = tmp_path / "nvidia-smi"
    tool.touch(mode=0o755)
    assert find_driver(tmp_path) == Driver(True)
    # A machine with a card has the library in any case.
    assert without in (Driver(False), Driver(True))
