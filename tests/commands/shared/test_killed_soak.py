"""kill -9 of `allstep soak --elastic` leaves nothing running."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from ranks import alive, environment

from allstep.commands.shared.process_tree import VARIABLE, marked
from allstep.commands.soak.training import rank_processes

pytestmark = pytest.mark.cold


def test_nothing_outlives_a_killed_soak(tmp_path):
    command = ("allstep", "soak", "--elastic", "--frameworks", "pytorch")
    environ = environment(TMPDIR=str(tmp_path))
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            job = psutil.Process(process.pid)
            while len(ranks := rank_processes(one.pid for one in job.children(recursive=True))) < 4:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            [mark] = re.findall(rf"{VARIABLE}=(\w+)", Path(f"/proc/{ranks[0]}/environ").read_text())
        finally:
            process.kill()
    deadline = time.monotonic() + 30
    while marked(mark) or any(map(alive, ranks.values())):
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.1)
