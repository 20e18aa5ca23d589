"""--deterministic on CPUs; `test_gpu.py` tests GPUs. Oracle: a second, equal run ends with the same bits."""

from __future__ import annotations

import sys

import pytest
from ranks import full, last, run, train

from allstep.common.base.errors import UserError
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE
from allstep.pytorch.strategies import STRATEGIES as OF_PYTORCH
from allstep.tensorflow.strategies import STRATEGIES as OF_TENSORFLOW


@pytest.mark.parametrize(
    ("framework", "num_ranks"), [("pytorch", 1), ("tensorflow", 1), full("pytorch", 3), full("tensorflow", 2)]
)
def test_equal_runs_end_in_equal_bits(framework, num_ranks, tmp_path):
    flags = ("--deterministic", "--epochs", 2, "--global-batch-size", 59)
    launcher = "alone" if num_ranks == 1 else "mpirun"
    runs = [train(framework, launcher, num_ranks, tmp_path / number, *flags) for number in "12"]
    assert len({last(run, "end")["weights_checksum"] for run in runs}) == 1


WITHOUT_SUCH_A_FORM = {
    # An operation that each framework refuses, even on CPUs.
    "pytorch": "import torch; torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)",
    "tensorflow": "import tensorflow as tf; tf.random.experimental.stateless_split; tf.timestamp()",
}


@pytest.mark.parametrize("framework", WITHOUT_SUCH_A_FORM)
def test_an_operation_without_such_a_form_is_a_user_s_mistake(framework, tmp_path):
    script = tmp_path / "hooked.py"
    script.write_text(f"""
from allstep.common.training.hooks import Hook
from allstep.common.process.exit import run_rank
from allstep.{framework} import train
class Computes(Hook):
    def on_step(self, session):
        {WITHOUT_SUCH_A_FORM[framework]}
run_rank(lambda: train.main(hooks=[Computes()]))
""")
    assert run(sys.executable, script, "--epochs", "1").returncode == 0
    result = run(sys.executable, script, "--epochs", "1", "--deterministic")
    assert result.returncode == 2, result.output
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("allstep: error: expected operations that have a deterministic form, received one in step 1")


@pytest.mark.parametrize(
    ("strategies", "flags", "expected"),
    [
        (
            OF_TENSORFLOW,
            ("parameter-server",),
            "synchronous strategy with --deterministic, received parameter-server",
        ),
        (OF_PYTORCH, ("horovod", "--autotune"), "--deterministic or --autotune, received both"),
    ],
)
def test_refused(strategies, flags, expected):
    with pytest.raises(UserError, match=expected):
        parse(strategies, ALONE, ["--deterministic", "--strategy", *flags])
