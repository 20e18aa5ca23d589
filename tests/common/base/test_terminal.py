"""Lines for the terminal. Oracle: a pipe in packet mode (pipe2(2), O_DIRECT), which keeps writes apart."""

from __future__ import annotations

import os
import subprocess
import sys

from allstep.common.base.errors import print_line, warn

SCRIPT = """
from allstep.common.base.errors import print_line
from allstep.common.reporting.base import EpochLines
print_line("said")
EpochLines().event("epoch", epoch=1, cumulative_seconds=1.0, epoch_seconds=1.0, images_per_second=9.0,
                   validation_loss=0.5, validation_accuracy=0.9)
"""


def test_what_commands_terminals_is_escaped(capsys):
    print_line("two\nlines \x1b[31m\u202e")
    warn("a\nb\x07")
    found = capsys.readouterr()
    assert found.out == "two\nlines \\x1b[31m\\u202e\n" and found.err == "allstep: warning: a\\nb\\x07\n"


def test_a_line_is_written_in_one_piece():
    receiving, sending = os.pipe2(os.O_DIRECT)
    with open(receiving, "rb", buffering=0) as pipe:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # as under horovodrun
        subprocess.run([sys.executable, "-c", SCRIPT], stdout=sending, env=environment, check=True, timeout=60)
        os.close(sending)
        writes = list(iter(lambda: pipe.read(4096), b""))
    assert writes[0] == b"said\n"
    assert len(writes) == 2 and writes[1].startswith(b"Epoch =  1:") and writes[1].endswith(b"= 0.900\n")
