"""Variables of Keras models that are no finite real numbers, through a resume. Oracle: a plain loop, in the program."""

from __future__ import annotations

import pytest
from jobs import HOROVODRUN_GLOO
from ranks import BIN, REPOSITORY, full, run

PROGRAM = REPOSITORY / "tests/strangers/programs/keras_state.py"


@pytest.mark.parametrize(
    ("strategy", "launcher", "ranks"), [("single", (), 1), full("horovod", (*HOROVODRUN_GLOO, 2), 2)]
)
def test_counters_flags_and_masks(strategy, launcher, ranks, tmp_path):
    result = run(*launcher, BIN / "python", PROGRAM, tmp_path, strategy)
    assert result.returncode == 0, result.output
    assert result.stdout.count("as in one process") == ranks
    if strategy == "single":
        assert "the optimizer has parameters that are not the model's; give each model a new one" in result.stdout
