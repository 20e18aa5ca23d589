"""The figures of start-up. Oracle: real launches on this host; no time is asserted."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from ranks import REPOSITORY, environment, run

from allstep.benchmarks.startup import ClusterLaunch, figures
from allstep.commands.hosts.command import parse_list

pytestmark = pytest.mark.cold


@pytest.mark.full
def test_rows(tmp_path):
    """This environment stands in for the unmodified one."""
    here = Path(run("python", "-c", "import sys; print(sys.executable)").stdout.strip())
    flags = ("--frameworks", "pytorch", "--rounds", 1, "-H", "localhost:2", "--unmodified", here)
    command = ("python", "-m", "allstep.benchmarks.startup", *flags, "--output", tmp_path / "out.json")
    result = subprocess.run(
        [str(part) for part in command], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert {figure["what"]: figure["target"] for figure in content["figures"]} == {
        "pytorch: seconds to first step / bare": "<= 1.2",
        "pytorch: bare / unmodified": "<= 0.6",
        "pytorch: launch / unmodified": "<= 0.6",
    }
    assert all(figure["ours"] > 0 and figure["reference"] > 0 for figure in content["figures"])


def test_figures():
    seconds = {
        "trainer": [3.0, 4.0, 5.0],
        "bare": [2.0, 4.0, 4.0],
        "unmodified bare": [8.0, 8.0, 8.0],
        "launch": [1.0, 1.0, 1.0],
        "unmodified launch": [4.0, 2.0, 2.0],
    }
    assert [figure.ratio for figure in figures("pytorch", seconds)] == [1.25, 0.5, 0.5]
    assert [figure.reached for figure in figures("pytorch", seconds)] == [False, True, True]


def test_commands():
    launch = ClusterLaunch(parse_list("server1:4,server2:4"), "gloo", None)
    ours = "horovodrun --gloo --disable-cache -np 8 -H server1:4,server2:4 touch done"
    assert shlex.join(launch.command("touch", "done")) == ours
    other = launch.command("touch", "done", python=Path("/other/bin/python"))
    assert other[0] == "env" and "PATH=/other/bin:/usr/local/bin:/usr/bin:/bin" in other
    assert "OMPI_MCA_orte_launch_agent=/other/bin/orted" in other and shlex.join(other).endswith(ours)
