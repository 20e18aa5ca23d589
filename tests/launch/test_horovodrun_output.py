"""Output of ranks under horovodrun --gloo arrives, or is lost with a line on standard error while the job goes on."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from ranks import LAUNCHERS, REPOSITORY, environment

pytestmark = pytest.mark.cold

LINES = [f"line {number} of some length to fill the pipe" for number in range(3000)]
LOST = "horovodrun: output is lost ([Errno {}); the job goes on\n"


@pytest.mark.parametrize(
    ("encoding", "rest", "start", "num_lines", "told"),
    [
        ("utf-8", "", "start \ufffd \u00e9", 3001, ""),
        ("ascii", "", r"start \ufffd \xe9", 3001, ""),
        ("utf-8", "| head -1", "start \ufffd \u00e9", 1, LOST.format("32] Broken pipe")),
        ("utf-8", "> /dev/full", "", 0, LOST.format("28] No space left on device")),
        ("utf-8", ">&-", "", 0, ""),
    ],
)
def test_output_of_ranks(encoding, rest, start, num_lines, told, tmp_path):
    words = (*LAUNCHERS["horovodrun-gloo"], 2, "--output-filename", tmp_path, sys.executable)
    line = f"{shlex.join(map(str, words))} tests/launch/programs/raw_output.py {rest}; exit ${{PIPESTATUS[0]}}"
    environ = environment(PYTHONIOENCODING=encoding)
    shell = ["bash", "-c", line]
    result = subprocess.run(shell, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, told)
    printed = result.stdout.splitlines()
    for rank in (0, 1) if num_lines > 1 else ():
        own = [line.partition(":")[2] for line in printed if line.startswith(f"[{rank}]<stdout>:")]
        assert own == [start, *LINES]
    assert num_lines != 1 or printed[0].endswith(start)
    assert len(printed) == (2 * num_lines if num_lines > 1 else num_lines)
    for rank in (0, 1):
        kept = (tmp_path / f"rank.{rank}" / "stdout").read_text().splitlines()
        assert [line.partition(":")[2] for line in kept][1:] == LINES
