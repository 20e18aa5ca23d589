"""The parity gate, on made-up curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from compared import OK, SETTINGS, cell

from allstep.commands.compare.gate import Gate, GateRun, gate_run, reference_of
from allstep.commands.parity import command as parity
from allstep.commands.parity import curves
from allstep.common.files.strict_json import to_json


class MadeUp(Gate):
    """A gate whose curves are made up instead of trained."""

    def __init__(self, *, num_kinks: int = 0, **changes: float) -> None:
        """Make the weights of all runs but the first diverge by 2e-4 for each of the first `num_kinks` seeds."""
        super().__init__(3, launch=lambda commands: [OK] * len(commands))
        self._changes, self._num_kinks, self.trained = changes, num_kinks, []

    def train(self, runs: Sequence[GateRun], seed: int = parity.SEED) -> None:
        for run in runs:
            self.trained.append((run.strategy, seed))
            change = 1 + self._changes.get(run.framework, 0) + self._changes.get(run.strategy, 0)
            losses = {step: change / step for step in (1, 2, 3)}
            num_seeds = len({seed for _, seed in self.trained})
            kink = 4e-4 if run.strategy != "independent" and num_seeds <= self._num_kinks else 0
            curve = curves.Curve(losses, {3: {"model/fc.weight": np.array([change + kink, -2.0])}})
            self._trained[run, seed] = OK, curve


@pytest.mark.parametrize(
    ("changes", "framework", "status"),
    [
        ({}, "pytorch", "passed"),
        ({"horovod": 5e-6}, "pytorch", "passed"),
        ({"horovod": 5e-5}, "pytorch", "failed"),
        ({"tensorflow": 5e-5}, "tensorflow", "passed"),
        ({"tensorflow": 5e-4}, "tensorflow", "failed"),
        ({"horovod": float("nan")}, "pytorch", "failed"),
    ],
)
def test_gate_lets_pass_what_trains_the_same_curve(changes, framework, status):
    reference = GateRun("pytorch", "independent", 1, "cnn", "float32")
    gate = MadeUp(**changes)
    assert gate.judge(reference, reference).status == "passed"
    verdict = gate.judge(GateRun(framework, "horovod", 2, "cnn", "float32"), reference)
    assert (verdict.status, verdict.reference) == (status, reference.id)
    assert (verdict.reason is None) == (status == "passed")
    json.dumps(to_json(verdict), allow_nan=False)


@pytest.mark.parametrize(("num_kinks", "num_seeds", "status"), [(0, 1, "passed"), (2, 3, "passed"), (3, 3, "failed")])
def test_weights_that_alone_are_apart_are_tried_with_other_seeds(num_kinks, num_seeds, status):
    reference, other = (GateRun("pytorch", name, 1, "cnn", "float32") for name in ("independent", "horovod"))
    gate = MadeUp(num_kinks=num_kinks)
    assert gate.judge(other, reference).status == status
    assert len(gate.trained) == len(set(gate.trained)) == 2 * num_seeds
    another = GateRun("pytorch", "ddp", 1, "cnn", "float32")
    gate.judge(another, reference)
    assert len(gate.trained) == len(set(gate.trained))  # the reference is trained once per seed


def test_runs_that_were_trained_together_are_not_trained_again():
    runs = [GateRun("pytorch", name, 1, "cnn", "float32") for name in ("independent", "horovod", "ddp")]
    gate = MadeUp(ddp=5e-5)
    gate.train(runs)
    assert [gate.judge(run, runs[0]).status for run in runs] == ["passed", "passed", "failed"]
    assert len(gate.trained) == len(runs)


def test_losses_that_are_apart_are_not_tried_again():
    reference, other = (GateRun("pytorch", name, 1, "cnn", "float32") for name in ("independent", "horovod"))
    gate = MadeUp(horovod=5e-5)
    assert gate.judge(other, reference).status == "failed"
    assert len(gate.trained) == 2


def test_resnets_are_judged_by_losses_alone():
    reference, other = (GateRun("pytorch", name, 1, "resnet18", "float32") for name in ("independent", "horovod"))
    for change, status in ((5e-4, "passed"), (5e-3, "failed")):
        verdict = MadeUp(horovod=change).judge(other, reference)
        assert (verdict.status, verdict.num_steps) == (status, 2)


@pytest.mark.parametrize(
    ("framework", "bound", "changes"),
    [("pytorch", 2e-2, {1e-2: "passed", 3e-2: "failed"}), ("tensorflow", 4e-2, {3e-2: "passed", 5e-2: "failed"})],
)
def test_bf16_is_judged_by_losses_alone(framework, bound, changes):
    reference = GateRun("pytorch", "independent", 1, "cnn", "bf16")
    other = GateRun(framework, "horovod", 1, "cnn", "bf16")
    for change, status in changes.items():
        verdict = MadeUp(horovod=change).judge(other, reference)
        assert (verdict.status, verdict.bound) == (status, bound)


def test_a_compiled_place_is_held_against_the_one_that_is_not():
    runs = [gate_run(cell(strategy="independent", ranks=1), SETTINGS), gate_run(cell(compiled=True), SETTINGS)]
    assert runs[0].group == runs[1].group and runs[0].id != runs[1].id
    assert MadeUp(horovod=5e-5).judge(runs[1], runs[0]).status == "failed"


def test_what_has_no_one_curve_is_not_judged():
    assert gate_run(cell(strategy="independent"), SETTINGS) is None
    assert gate_run(cell(strategy="parameter-server", framework="tensorflow"), SETTINGS) is None
    assert gate_run(cell(strategy="independent", ranks=1), SETTINGS) is not None
    runs = [GateRun("pytorch", "horovod", ranks, "resnet18", "float32") for ranks in (1, 2)]
    assert runs[0].group != runs[1].group  # batch norm sees different samples


def test_slices_leave_equal_bits_within_a_framework_or_fail():
    settings = replace(SETTINGS, slices=4)
    cells = [cell(strategy="independent", ranks=1), cell(), cell(strategy="model-parallel")]
    cells += [cell(framework="tensorflow", ranks=number) for number in (1, 2)]
    runs = [run for one in cells if (run := gate_run(one, settings))]
    assert [run.slices for run in runs] == [4, 4, None, 4, 4]
    assert [runs.index(reference_of(run, runs)) for run in runs] == [0, 0, 0, 0, 3]
    gate = MadeUp(horovod=1e-12, tensorflow=5e-5)
    assert [gate.judge(run, reference_of(run, runs)).status for run in runs] == [
        *("passed", "failed", "passed", "passed", "passed")
    ]
    assert gate.judge(runs[1], runs[0]).bound == 0
    deep = [GateRun("pytorch", "horovod", ranks, "resnet32", "float32", slices=4) for ranks in (1, 2)]
    assert deep[0].group == deep[1].group  # batch norm of each slice sees the same samples
