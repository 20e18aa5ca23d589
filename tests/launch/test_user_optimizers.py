"""Optimizers of a user's own, with clipping, per-group options and a resume: trained as their framework trains them.

The program has the oracle: the framework's own loop in one process.
"""

from __future__ import annotations

import re

import pytest
from jobs import HOROVODRUN_GLOO, MPIRUN
from ranks import BIN, REPOSITORY, run

PROGRAM = REPOSITORY / "tests/launch/programs/user_optimizers.py"
JOBS = {
    "pytorch single": ((), "all", {}),
    "pytorch horovod": ((*HOROVODRUN_GLOO, 2), "own class", {"ema": 0.9}),
    "pytorch ddp, slices": ((*MPIRUN, 2), "nadam", {"slices": 4}),
    "pytorch fsdp": ((*MPIRUN, 2), "groups", {}),
    "tensorflow horovod": ((*MPIRUN, 2), "muon", {"ema": 0.9}),
    "tensorflow single, slices": ((), "all", {"slices": 3}),
    "tensorflow mirrored": ((), "adafactor", {"num_devices": 2, "base_lr": 0.05}),
}


@pytest.mark.parametrize("job", JOBS)
def test_trained_as_by_its_own_loop(job, tmp_path):
    launcher, optimizer, flags = JOBS[job]
    framework, strategy = job.partition(",")[0].split()
    words = [f'strategy="{strategy}"', *(f"{name}={value}" for name, value in flags.items())]
    for epochs in ("1", "2") if strategy == "horovod" else ("1,2",):  # a resume in other processes, and in the same
        result = run(*launcher, BIN / "python", PROGRAM, framework, optimizer, epochs, tmp_path, *words)
        assert result.returncode == 0, result.output
        found = re.findall("as by its own loop: ", result.stdout)
        assert len(found) == (6 if optimizer == "all" else 2 if launcher else 1), result.output
