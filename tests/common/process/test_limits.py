"""Limits of the machine that end a command. Oracle: the contract of a user's mistake, one line and status 2."""

from __future__ import annotations

import errno
import os
from unittest import mock

import pytest

from allstep.common.base.errors import Fault, UserError
from allstep.common.process.exit import _call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EMFILE])
def test_a_limit_of_the_machine_is_a_line(number):
    def fails() -> None:
        raise OSError(number, os.strerror(number), "runs/a")

    with pytest.raises(UserError, match=f"runs/a: {os.strerror(number)}; make room, or raise the limit"):
        _call(fails)


def test_what_may_not_be_read_is_a_line():
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/a/manifest.json")
    with pytest.raises(UserError, match=r"^runs/a/manifest\.json: Permission denied; get access to it, or name"):
        _call(mock.Mock(side_effect=error))


def test_a_name_that_is_too_long_is_a_line():
    with pytest.raises(UserError, match=r"^x+\.\.\. .5000 characters.: File name too long; give a shorter one"):
        _call(lambda: os.stat("x" * 5000) and None)


def test_other_errors_stay_what_they_are():
    def fails() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(OSError, match="Input/output error"):
        _call(fails)


def test_too_few_processes_are_a_line():
    with pytest.raises(UserError, match=r"^can't start new thread; make room, or raise the limit \(ulimit -a\)"):
        _call(mock.Mock(side_effect=RuntimeError("can't start new thread")))


def test_too_little_memory_is_a_line():
    for error in (
        *(MemoryError("1 TiB"), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
        ImportError("libtorch_python.so: failed to map segment from shared object"),
    ):
        with pytest.raises(UserError, match="not enough memory: .*; take a smaller network or a larger host"):
            _call(mock.Mock(side_effect=error))
    for error in (RuntimeError("shapes"), Fault("step 1 failed: CUDA out of memory")):
        with pytest.raises(type(error), match=f"^{error}$"):
            _call(mock.Mock(side_effect=error))


@pytest.mark.parametrize("library", ["Horovod", "Default process group"])
def test_ranks_that_code_of_a_user_has_parted_are_a_line(library):
    with pytest.raises(UserError, match=f"{library} has not been initialized.* A user's code has ended it; leave that"):
        _call(mock.Mock(side_effect=ValueError(f"{library} has not been initialized; use hvd.init().")))
