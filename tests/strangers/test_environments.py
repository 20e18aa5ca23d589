"""Environments that users have, from a missing HOME to what another launcher has left. Oracle: the undisturbed run."""

from __future__ import annotations

import json

import pytest
from ranks import REPOSITORY, launch

pytestmark = pytest.mark.cold

PROGRAM = REPOSITORY / "tests/strangers/programs/environments.py"
REFUSED = {
    "folder that is removed": "the folder where this was started is gone; change to one that exists",
    "files of 4 KB": "could not be saved: Error while serializing: I/O error: File too large (os error 27); make room",
    "0 threads": "expected OMP_NUM_THREADS to be a whole number from 1 to 8192, received '0'",
    "threads that are a word": "expected OMP_NUM_THREADS to be a whole number from 1 to 8192, received 'two'",
    "allocator that PyTorch cannot read": "PyTorch cannot read PYTORCH_CUDA_ALLOC_CONF=expandable_segments; correct",
    "left by horovodrun": "expected HOROVOD_CROSS_SIZE to be 1, received nothing; start the job by horovodrun",
}
SILENT = ("no standard output", "no standard streams")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Train once in each environment, in forks of one process."""
    directory = tmp_path_factory.mktemp("environments")
    result = launch("alone", 1, PROGRAM, directory)
    assert result.returncode == 0, result.output
    return json.loads((directory / "results.json").read_text())


def test_each_trains_as_usual_or_is_refused_in_a_line(results):
    assert len(results) >= 35 and REFUSED.keys() <= results.keys()
    usual = results["as it is"]
    for name, result in results.items():
        # A save that fails before the run waits for it is told, and tried again.
        printed = [line for line in result["printed"].splitlines() if "it is tried again until" not in line]
        if name in REFUSED:
            assert result["status"] == 2 and REFUSED[name] in printed[-1], (name, result)
            assert len(printed) == 1 + len(result["losses"]), (name, result)
        else:
            rounding = 1e-6 if "threads" in name else 0  # their number decides the order of some processors' sums
            assert result["losses"] == pytest.approx(usual["losses"], rel=rounding, abs=0), (name, result)
            assert result["status"] == 0, (name, result)
            assert len(printed) == (0 if name in SILENT else 1), (name, result)
