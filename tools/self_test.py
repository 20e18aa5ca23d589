"""All-reduce on two real ranks, in PyTorch and in TensorFlow, under MPI and under Gloo; ends `make setup`.

.venv/bin/python tools/self_test.py [torch] [tensorflow]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 120
NUM_RANKS = 2
TORCH_RANK = """
import horovod.torch as hvd, torch
hvd.init()
total = hvd.allreduce(torch.full((1000,), hvd.rank() + 1.0), op=hvd.Sum)
"""
TENSORFLOW_RANK = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.fill((1000,), hvd.rank() + 1.0), op=hvd.Sum).numpy()
"""
# 1 + 2, the sum over both ranks of rank + 1.
CHECK = """
assert hvd.size() == 2, hvd.size()
assert (total == 3.0).all(), total
"""
RANK_PROGRAMS = {"torch": TORCH_RANK + CHECK, "tensorflow": TENSORFLOW_RANK + CHECK}


def run_on_two_ranks(framework: str, controller: str) -> None:
    """Run the framework's rank program under horovodrun; exits the process if it fails."""
    horovodrun = str(Path(sys.prefix, "bin", "horovodrun"))
    program = [sys.executable, "-c", RANK_PROGRAMS[framework]]
    result = subprocess.run(
        [horovodrun, "-np", str(NUM_RANKS), f"--{controller}", *program],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if result.returncode != 0:
        print(result.stdout)
        sys.exit(f"{framework} on {NUM_RANKS} ranks under {controller} ended with status {result.returncode}")
    print(f"ok: {framework} on {NUM_RANKS} ranks under {controller}", flush=True)


if __name__ == "__main__":
    for framework in sys.argv[1:] or RANK_PROGRAMS:
        for controller in ("mpi", "gloo"):
            run_on_two_ranks(framework, controller)
