"""An elastic job with a host that fails repeatedly, and without which the job cannot go on.

Oracles: the failures that `ranks/failing_host.py` causes, and checkpoints as `common.checkpoint` reads them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from ranks import Result, events, run

from allstep.common.checkpoint import load

SCRIPT = Path(__file__).parent / "ranks" / "failing_host.py"
NUM_FAILURES = 3
NUM_STEPS = 7
COMMIT_EVERY = 5


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Path, Result]:
    """Run the job, and return the output directory and the result."""
    output_dir = tmp_path_factory.mktemp("failing") / "run"
    elastic = ("-np", 2, "--min-np", 2, "--max-np", 2, "--blacklist-cooldown-range", 1, 1, "--elastic-timeout", 4)
    discovery = ("--host-discovery-script", "echo localhost:1; echo 127.0.0.1:1")
    flags = ("--elastic", "--global-batch-size", 32, "--commit-every", COMMIT_EVERY, "--model", "mlp", "--log-every", 1)
    return output_dir, run(
        "horovodrun", *elastic, *discovery, sys.executable, SCRIPT, *flags, "--output-dir", output_dir
    )


def test_it_is_left_out_after_its_third_failure_and_named(job):
    output_dir, result = job
    assert [event["world_size"] for event in events(output_dir) if event["event"] == "start"] == [2] * NUM_FAILURES
    left_out = re.findall("horovodrun: host (.*) has failed 3 times and is left out from now on", result.stderr)
    assert len(left_out) == 1 and left_out[0] in ("localhost", "127.0.0.1")


def test_the_job_ends_with_one_line_about_why_and_one_about_how_to_go_on(job):
    output_dir, result = job
    assert result.returncode not in (0, 2)
    assert result.stderr.count("Please check that you have enough resources to run at least 2 Horovod processes") == 1
    assert "Traceback" not in result.output
    # Each kill comes NUM_STEPS after the commit from which the job has resumed, with one later commit before it.
    steps = [NUM_STEPS // COMMIT_EVERY * COMMIT_EVERY * number for number in range(1, NUM_FAILURES + 1)]
    assert [int(step) for step in re.findall(r"step (\d+) is saved while", result.stderr)] == steps
    assert load("latest", output_dir / "checkpoints", warn=pytest.fail).progress.step == steps[-1]
