"""`allstep parity`, and a short run of it. Oracle: the bounds that the command states."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from ranks import BIN, full, run

from allstep.commands.cli import call
from allstep.commands.parity import command as parity
from allstep.commands.parity import curves
from allstep.commands.parity.command import Bounds
from allstep.commands.parity.curves import Curve, Difference
from allstep.common.base.errors import Fault, UserError


@pytest.mark.parametrize("ranks", ["1,2", full("1,2,4")])
def test_any_number_of_ranks_and_both_frameworks_train_alike(ranks):
    """Compare 50 steps of SGD with momentum: within 1e-5 on any number of ranks, and 1e-4 between frameworks."""
    flags = ("--optimizers", "momentum", "--strategies", "horovod", "--ranks", ranks)
    result = run("allstep", "parity", *flags, timeout=600)
    assert result.returncode == 0, result.output
    assert "all within the bounds" in result.stdout
    steps = re.findall(r"^ +(\d+) +\d", result.stdout, re.MULTILINE)
    assert [int(step) for step in steps] == list(range(5, 51, 5))


def made(change: float = 0.0, *, at: int = 1) -> Curve:
    """Return a curve of six steps, with weights at every third; it deviates by `change` from the step `at` on."""
    losses = {step: 2.0 / step * (1 + change * (step >= at)) for step in range(1, 7)}
    weights = {}
    for step in (3, 6):
        tensor = np.array([[0.5, -4.0], [1.0, 0.0]])
        tensor[1, 1] += change * (step >= at)
        weights[step] = {"model/fc1.weight": tensor, "model/fc1.bias": np.array([0.25, 0.0])}
    return Curve(losses, weights)


def test_difference_is_that_of_the_description():
    found = curves.apart(made(), made(0.01, at=2))
    assert found[3] == Difference(pytest.approx(0.01), pytest.approx(0.01 / 4))  # the largest weight is 4
    assert curves.apart(made(), made()) == {3: Difference(0, 0), 6: Difference(0, 0)}
    later = curves.apart(made(), made(0.01, at=5))
    assert (later[3], later[6].loss > 0) == (Difference(0, 0), True)


def test_weights_that_are_no_numbers_or_of_other_tensors_are_not_close():
    weights, changed = made().weights[3], made(math.nan).weights[3]
    assert math.isnan(curves.weights_apart(weights, changed))
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    assert curves.weights_apart(zeros, weights) == math.inf
    with pytest.raises(Fault, match="same tensors"):
        curves.weights_apart(weights, {"model/fc1.bias": weights["model/fc1.bias"]})


@pytest.mark.parametrize(("change", "within"), [(0.0, True), (9e-6, True), (2e-5, False), (math.nan, False)])
def test_passes_within_the_bound_alone(change, within):
    assert parity.passes(curves.apart(made(), made(change)), Bounds(), "pytorch runs") == within


def test_columns_compare_ranks_with_the_first_and_frameworks_at_the_same_place():
    alone, two = ("single", 1), ("horovod", 2)
    curves = {
        ("pytorch", alone): made(),
        ("pytorch", two): made(1e-6),
        ("tensorflow", alone): made(1e-3),
        ("tensorflow", two): made(1e-3),
    }
    columns = parity.compare(curves)
    assert list(columns) == ["pytorch runs", "tensorflow runs", "frameworks"]
    largest = [column[3].loss for column in columns.values()]
    assert largest == pytest.approx([1e-6, 0, 1e-3], rel=1e-2)


def test_all_strategies_are_those_that_can_have_the_ranks():
    assert parity.layouts("pytorch", parity.SYNCHRONOUS, (1, 2)) == [
        *(("single", 1), ("horovod", 1), ("horovod", 2), ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)),
        *(("data-parallel", 1), ("model-parallel", 2)),
    ]
    assert {name for name, _ in parity.layouts("tensorflow", parity.SYNCHRONOUS, (2,))} == {
        *("single", "horovod", "mirrored", "multi-worker-mirrored", "central-storage")
    }


@pytest.mark.parametrize(("change", "status"), [(1e-6, None), (1e-2, 1)])
def test_exit_status_tells_whether_all_is_within(change, status, monkeypatch, capsys):
    """The training is fake; the rest, from the curves to the exit status, is real."""
    monkeypatch.setattr(parity, "train", lambda _, framework, layout, __: made(change if layout[1] == 4 else 0))
    arguments = ["parity", "--optimizers", "sgd", "--steps", "6", "--every", "3"]
    if status is None:
        call(arguments)
    else:
        with pytest.raises(SystemExit) as end:
            call(arguments)
        assert end.value.code == status
    quote = capsys.readouterr().out
    assert ("NOT within" in quote) == (status == 1)
    assert f"{change:.1e}" in quote and "1e-05" in quote and "1e-04" in quote


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["parity", "--optimizers", "sgd,lion"], "received lion"),
        (["parity", "--ranks", "1,0"], "received 0"),
        (["parity", "--steps", "many"], "received many"),
        (["parity", "--step", "3"], "--step"),
        (["parity", "--ranks", "1", "--frameworks", "pytorch", "--strategies", "single"], "at least two runs"),
        (["soak", "--kills", "-1"], "received -1"),
        (["compere"], "received compere"),
    ],
)
def test_a_mistake_is_one_line(arguments, expected):
    with pytest.raises(UserError) as caught:
        call(arguments)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_has_exit_status_2():
    result = run("allstep", "parity", "--ranks", "none")
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("allstep: error: ")


@pytest.mark.parametrize("arguments", [("--help",), (), ("parity", "--help"), ("soak", "--help")])
def test_help_imports_no_framework(arguments):
    result = run("python", "-X", "importtime", BIN / "allstep", *arguments)
    assert result.returncode == 0 and "parity" in result.stdout or "soak" in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "tensorflow", "keras", "horovod", "sklearn", "rich"}
