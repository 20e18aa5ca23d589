"""The replica check, on real ranks. Oracle: weights that were made to differ."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import launch

from allstep.common.base.errors import Fault
from allstep.common.exact.replica_check import compare


def test_names_ranks_and_first_parameter():
    digests = np.array([[1, 2, 3], [1, 2, 3], [1, 9, 3], [1, 2, 8]])
    with pytest.raises(Fault, match=r"after step 1: the weights of rank 2, 3 differ from those of rank 0, first in b$"):
        compare(["a", "b", "c"], digests, "after step 1")


def test_equal_weights_pass():
    compare(["a", "b"], np.array([[1, 2], [1, 2]]), "after step 1")


# A trainer whose rank 1 changes one weight in its third step, without the strategy.
DRIFT = """
from allstep.common.process.exit import run_rank
from allstep.common.training.hooks import Hook
from allstep.{framework} import train
class Drifts(Hook):
    def on_step(self, session):
        worker = session.worker
        if session.progress.step == {step} and session.placement.rank == 1:
            {change}
run_rank(lambda: train.main(["--epochs", "3"], [Drifts()]))
"""
CHANGE = {
    "pytorch": "worker._network.fc1.bias.data[0] += 1e-6",
    "tensorflow": "worker._model.get_layer('fc1').bias.assign_add([1e-6] + [0.0] * 127)",
}


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
@pytest.mark.parametrize(("step", "moment"), [(1, "after step 1"), (30, "after epoch 2")])
def test_drift_stops_the_job(framework, step, moment, tmp_path):
    script = tmp_path / "drift.py"
    script.write_text(DRIFT.format(framework=framework, step=step, change=CHANGE[framework]))
    result = launch("horovodrun-mpi", 2, script)
    assert result.returncode == 1
    message = f"out of step {moment}: the weights of rank 1 differ from those of rank 0, first in fc1."
    assert result.output.count(message) == 1, result.output
