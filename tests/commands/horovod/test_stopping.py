"""A rank that horovodrun stops while its shell starts it. Oracle: the kernel knows no process of the shell's group."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import psutil
import pytest
from horovod.runner.common.util.safe_shell_exec import terminate_executor_shell_and_children


@pytest.mark.launch
def test_a_shell_that_has_not_started_its_rank_starts_none(monkeypatch):
    find = psutil.Process.children
    shell = subprocess.Popen("read go; sleep 31", shell=True, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def find_before_the_start(process: psutil.Process) -> list[psutil.Process]:
        found = find(process)
        print("go", file=shell.stdin, flush=True)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(psutil.Process, "children", find_before_the_start)
    terminate_executor_shell_and_children(shell.pid)
    with pytest.raises(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
