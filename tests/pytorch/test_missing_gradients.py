"""Weights that are frozen, or lack gradients on some or all ranks. Oracle: torch's own loop, in the program."""

from __future__ import annotations

import pytest
from jobs import HOROVODRUN_GLOO
from ranks import BIN, REPOSITORY, full, run

PROGRAM = REPOSITORY / "tests/pytorch/programs/missing_gradients.py"
ALL = ("sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad")


def train(launcher, directory, optimizer, *flags):
    result = run(*launcher, BIN / "python", PROGRAM, directory, optimizer, *flags)
    assert result.returncode == 0, result.output
    return result.stdout.count("as in one process")


@pytest.mark.parametrize("optimizer", [name if name in ("sgd", "adam") else full(name) for name in ALL])
def test_alone(optimizer, tmp_path):
    """Train with passes and slices, through a resume after a step in which some weights have no state yet."""
    assert train((), tmp_path / "a", optimizer, "accumulate_steps=2") == 1
    assert train((), tmp_path / "b", optimizer, "slices=4", "epochs=1") == 0
    assert train((), tmp_path / "b", optimizer, "slices=4", 'resume="latest"') == 1


TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node", 2, "--no-python")


@pytest.mark.parametrize("flags", [(), full("accumulate_steps=2"), full("gradient_as_bucket_view=false")], ids=str)
def test_on_two_ranks_of_ddp(flags, tmp_path):
    flags = (flags,) if isinstance(flags, str) else flags
    assert train(TORCHRUN, tmp_path, "adam", 'strategy="ddp"', "find_unused_parameters=true", *flags) == 2


def test_ddp_refuses_them_by_name_without_its_flag(tmp_path):
    result = run(*TORCHRUN, BIN / "python", PROGRAM, tmp_path, "sgd", 'strategy="ddp"')
    assert result.returncode and "gradient in a step, where DDP expects" in result.output, result.output
    assert "give --find-unused-parameters" in result.output


@pytest.mark.parametrize("number", [2, full(9)])
def test_fsdp_refuses_other_layers_by_name(number):
    """It would mix weights of layers that have one size."""
    result = run(*TORCHRUN, BIN / "python", REPOSITORY / "tests/pytorch/programs/other_layers.py", number)
    assert (
        "--strategy fsdp needs the same layers in all passes on all ranks, other is used in some alone" in result.output
    )
    assert "Fault" not in result.output and "exitcode  : 2" in result.output, result.output


@pytest.mark.parametrize(("optimizer", "flags"), [("adam", ()), ("sgd", ("slices=4",)), full("adam", ("slices=4",))])
def test_on_two_ranks_of_horovod(optimizer, flags, tmp_path):
    launcher = (*HOROVODRUN_GLOO, 2)
    assert train(launcher, tmp_path, optimizer, 'strategy="horovod"', *flags, "epochs=1") == 0
    assert train(launcher, tmp_path, optimizer, 'strategy="horovod"', *flags, 'resume="latest"') == 2
