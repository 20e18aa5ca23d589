"""Progress of long commands. Oracles: a real terminal of 80 columns, and arithmetic on a clock that tests set."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import sys
import termios
from contextlib import contextmanager
from fcntl import ioctl

import pytest

from allstep.common.base.progress_bar import ProgressBar, in_words

LONG = "cell 7 of 24: synthetic-weak.pytorch.multi-worker-mirrored.2.wide-resnet.64.float32"


class Clock:
    """A clock that stands still until `seconds` is changed."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "less than a minute left"),
        (61, "about 1 minute left"),
        (360, "about 6 minutes left"),
        (7300, "about 2 hours left"),
    ],
)
def test_time_left_is_as_exact_as_a_forecast_can_be(seconds, expected):
    assert in_words(seconds) == expected


def test_time_left_follows_the_parts_that_this_call_has_done():
    clock = Clock()
    progress = ProgressBar(10, done=4, clock=clock)  # 4 parts by an earlier call, in unknown time
    assert progress.time_left() == ""
    clock.seconds = 120
    progress.advance(2)  # 60 s a part
    assert progress.time_left() == "about 4 minutes left"
    clock.seconds = 240
    assert progress.time_left() == "about 2 minutes left"
    progress.reach(10)
    assert progress.time_left() == ""


def test_a_log_has_plain_lines_and_no_bar(capsys):
    clock = Clock()
    with ProgressBar(3, clock=clock) as progress:
        progress.begin("gate: curve 1 of 2")
        progress.begin("trial 1", in_log=False)
        clock.seconds = 60
        progress.end("1 of 3: sgd")
        progress.begin("cell 2 of 3")
        progress.end("3 of 3: adam", parts=2)
    captured = capsys.readouterr()
    assert captured.out == "1 of 3: sgd (about 2 minutes left)\n3 of 3: adam\n"
    assert captured.err == "gate: curve 1 of 2\ncell 2 of 3, about 2 minutes left\n"


@contextmanager
def terminal(monkeypatch, columns: int):
    """Make standard output and error a terminal, and yield a function that returns what it has received."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def received() -> str:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        text = b""
        while select.select([ours], [], [], 0.2)[0]:  # the kernel passes it on in parts
            text += os.read(ours, 1 << 20)
        return text.decode()

    with os.fdopen(theirs, "w", buffering=1) as both, monkeypatch.context() as replaced:
        replaced.setattr(sys, "stdout", both)
        replaced.setattr(sys, "stderr", both)
        replaced.setattr(sys, "__stderr__", both)
        yield received
    os.close(ours)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_terminal_of_80_columns_shows_one_line_below_what_is_printed(monkeypatch, is_plain):
    clock = Clock()
    with terminal(monkeypatch, 80) as received:
        if is_plain:
            monkeypatch.setenv("NO_COLOR", "1")
        with ProgressBar(24, clock=clock) as progress:
            progress.begin(LONG)
            clock.seconds = 120
            progress.end("6 of 24: done", parts=6)
            progress._bar.refresh()
        text = received()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    assert lines.count("6 of 24: done") == 1  # without the time left, which is next to the bar
    bars = [line for line in lines if "minutes left" in line]
    assert bars and all(len(line) <= 80 for line in bars)
    assert bars[-1].startswith("cell 7 of 24: synthetic-weak") and bars[-1].endswith("about 6 minutes left")
    assert "…" in bars[-1] and "━━━━" in bars[-1]
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", text)) is not is_plain
