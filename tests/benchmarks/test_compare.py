"""`allstep compare`: its statistics by oracles, and real cells that succeed, hang, are interrupted and are taken up."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from ranks import BIN, environment, run

from allstep.benchmarks import parity, repeated
from allstep.benchmarks.comparison import machine, results, samples, session
from allstep.benchmarks.comparison.availability import unavailable
from allstep.benchmarks.comparison.cells import Cell, Settings, commands, matrix
from allstep.benchmarks.comparison.estimate import Estimate, estimate
from allstep.benchmarks.comparison.gate import Gate, Place, place_of
from allstep.benchmarks.comparison.jobs import Outcome, run_job
from allstep.benchmarks.comparison.rules import rules
from allstep.benchmarks.comparison.session import Comparison
from allstep.benchmarks.comparison.table import note
from allstep.common.cli import call
from allstep.common.errors import UserError

SETTINGS = Settings(2, 2, 2, "digits", None, 2, 0.01, 0.9, 3, 1)
OK = Outcome("ok", None, 1000.0, 9.0, None)


def cell(
    workload: str = "synthetic-weak",
    strategy: str = "horovod",
    ranks: int = 2,
    framework: str = "pytorch",
    precision: str = "float32",
) -> Cell:
    return Cell(workload, framework, strategy, ranks, "cnn", 64, precision)


# Statistics.


@pytest.mark.parametrize("values", [[3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 9.0], [7.0, 7.0, 7.0]])
def test_estimate_is_scipys(values):
    found = estimate(values)
    low = high = values[0]  # SciPy has no number for an interval without spread
    if len(set(values)) > 1:
        low, high = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))
    assert (found.num, found.median, found.min, found.max) == (len(values), np.median(values), min(values), max(values))
    assert (found.mean, found.stdev) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_a_single_sample_has_no_spread():
    assert estimate([4.0]) == Estimate(1, 4, 4, 4, 4, 0, 4, 4)


# Cells.


def test_matrix_has_what_frameworks_have_and_what_the_others_are_compared_with():
    strategies = ["ddp", "parameter-server", "ddp"]
    what = ["cnn"], [64], ["float32"]
    cells = matrix(["real-strong"], ["pytorch", "tensorflow"], strategies, [2, 2], *what)
    assert [(one.framework, one.strategy, one.ranks) for one in cells] == [
        ("pytorch", "independent", 1),
        ("pytorch", "independent", 2),
        ("pytorch", "ddp", 1),
        ("pytorch", "ddp", 2),
        ("tensorflow", "independent", 1),
        ("tensorflow", "independent", 2),
        ("tensorflow", "parameter-server", 2),  # it has no form on one rank
    ]
    assert len({one.id for one in cells}) == len(cells)


def test_weak_scaling_keeps_the_batch_of_a_rank_and_strong_scaling_that_of_all():
    assert cell("synthetic-weak").global_batch_size == 128 and cell("synthetic-strong").global_batch_size == 64
    for workload, batch in (("real-weak", "64"), ("real-strong", "32")):
        both, outputs = commands(cell(workload, "independent"), SETTINGS, Path("at"))
        assert len(both) == len(outputs) == 2
        for command in both:
            assert command[command.index("--global-batch-size") + 1] == batch
            assert command[command.index("--strategy") + 1] == "single"
            assert command[command.index("--meet") + 1 :][:2] == ["at", "2"]


# Samples.


def output(*seconds_by_rank: list[float], first_step_at: float = 1004.0, accuracies: tuple[float, ...] = ()) -> dict:
    epochs = [
        {"epoch": number + 1, "seconds": 2.0 * (number + 1), "validation_accuracy": accuracy}
        for number, accuracy in enumerate(accuracies)
    ]
    return {
        "first_step_at": first_step_at,
        "blocks": [{"num_images": 100, "seconds_by_rank": seconds} for seconds in seconds_by_rank],
        "epochs": epochs or None,
        "peak_memory_bytes_by_rank": [10] * len(seconds_by_rank[0]),
    }


def made(of: Cell, number: int, *outputs: dict) -> dict:
    return samples.make(of, number, OK, outputs, target=0.9, commands=[["true"]])


def test_the_slowest_rank_counts_and_the_median_block():
    sample = made(cell(), 0, output([1.0, 2.0], [4.0, 1.0], [1.0, 1.0]))
    assert [block["images_per_second"] for block in sample["blocks"]] == [50, 25, 100]
    assert (sample["images_per_second"], sample["startup_seconds"]) == (50, 4.0)


def test_independent_processes_add_up_and_the_slowest_of_them_counts():
    sample = made(cell(strategy="independent"), 0, output([1.0]), output([2.0], first_step_at=1007.0))
    assert (sample["images_per_second"], sample["startup_seconds"]) == (100, 7.0)
    assert sample["peak_memory_bytes_by_rank"] == [10, 10]


@pytest.mark.parametrize(("accuracies", "seconds"), [((0.8, 0.91, 0.95), 4.0), ((0.8, 0.89), None)])
def test_time_to_accuracy_is_that_of_the_first_epoch_with_it(accuracies, seconds):
    sample = made(cell("real-strong"), 0, output([1.0], accuracies=accuracies))
    assert sample["seconds_to_target"] == seconds


def test_failed_launches_stay_visible():
    good = made(cell(), 0, output([1.0]))
    bad = samples.make(cell(), 1, Outcome("timeout", "took longer", 0.0, 9.0, "log"), (), target=1, commands=[["true"]])
    statuses = [samples.summarise(cell(), of_cell)["status"] for of_cell in ([good], [good, None], [good, bad], [bad])]
    assert statuses == ["ok", "pending", "partial", "failed"]
    assert samples.summarise(cell(), [good, bad])["reason"] == "took longer"
    assert samples.summarise(cell(), [bad, None])["images_per_second"] is None


def test_efficiency_is_the_ratio_within_a_round():
    rates = {
        cell(strategy="independent", ranks=1): [100, 110],
        cell(strategy="independent", ranks=2): [160, 170],
        cell(ranks=1): [80, 100],
        cell(): [120, None],
        cell(framework="tensorflow"): [60, 90],
    }
    of_all = {
        of.id: [rate and made(of, number, output([100 / rate])) for number, rate in enumerate(of_cell)]
        for of, of_cell in rates.items()
    }
    found = samples.efficiency(cell(), of_all, set(of_all))
    medians = {name: ratio["median"] for name, ratio in found.items()}
    expected = {"same_strategy_one_rank": 0.75, "single_process": 0.6, "independent": 0.75, "first_framework": 1}
    assert medians == pytest.approx(expected)
    assert samples.efficiency(cell(framework="tensorflow"), of_all, set(of_all))["first_framework"]["num"] == 1
    # What is not to be compared has no ratios, and nobody has one to it.
    assert samples.efficiency(cell(), of_all, set(of_all) - {cell().id}) == {}
    assert "single_process" not in samples.efficiency(cell(), of_all, {cell().id, cell(ranks=1).id})


# The gate.


class MadeUp(Gate):
    """Curves are made up; the launches of the test below are not."""

    def __init__(self, **changes: float) -> None:
        super().__init__(3, launch=lambda _: OK)
        self._changes = changes

    def _train(self, place: Place) -> tuple[Outcome, parity.Curve]:
        change = 1 + self._changes.get(place.framework, 0) + self._changes.get(place.strategy, 0)
        losses = {step: change / step for step in (1, 2, 3)}
        return OK, parity.Curve(losses, {3: {"model/fc.weight": np.array([change, -2.0])}})


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
    reference = Place("pytorch", "independent", 1, "cnn", "float32")
    gate = MadeUp(**changes)
    assert gate.judge(reference, reference)["status"] == "passed"
    verdict = gate.judge(Place(framework, "horovod", 2, "cnn", "float32"), reference)
    assert (verdict["status"], verdict["reference"]) == (status, reference.id)
    assert (verdict["reason"] is None) == (status == "passed")
    json.dumps(verdict, allow_nan=False)


def test_resnets_are_judged_by_losses_alone():
    reference, other = (Place("pytorch", name, 1, "resnet18", "float32") for name in ("independent", "horovod"))
    for change, status in ((5e-4, "passed"), (5e-3, "failed")):
        verdict = MadeUp(horovod=change).judge(other, reference)
        assert (verdict["status"], verdict["num_steps"]) == (status, 2)


def test_bf16_is_judged_by_losses_alone():
    reference, other = (Place("pytorch", name, 1, "cnn", "bf16") for name in ("independent", "horovod"))
    for change, status in ((1e-2, "passed"), (5e-2, "failed")):
        verdict = MadeUp(horovod=change).judge(other, reference)
        assert (verdict["status"], verdict["bound"]) == (status, 2e-2)


def test_what_has_no_one_curve_is_not_judged():
    assert place_of(cell(strategy="independent")) is None
    assert place_of(cell(strategy="parameter-server", framework="tensorflow")) is None
    assert place_of(cell(strategy="independent", ranks=1)) is not None
    places = [Place("pytorch", "horovod", ranks, "resnet18", "float32") for ranks in (1, 2)]
    assert places[0].group != places[1].group  # batch norm sees other samples


# Launches.


def test_a_hanging_launch_is_ended_with_all_that_it_started(tmp_path):
    """The grandchild is in a session of its own, as the ranks of mpirun are, and does not listen to SIGTERM."""
    script = (
        f"import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid(); open({str(tmp_path / 'pid')!r}, "
    )
    script += "'w').write(str(os.getpid())); time.sleep(1000)"
    command = ["sh", "-c", f"{shlex.join([sys.executable, '-c', script])} & sleep 1000"]
    outcome = run_job([command], time_limit=2, num_threads=1)
    assert (outcome.status, outcome.reason) == ("timeout", "took longer than 2 s and was ended")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_the_first_failure_ends_the_others_and_its_line_is_the_reason():
    told = "echo '[1,0]<stderr>:allstep: error: expected this, received that'; exit 2"
    outcome = run_job([["sh", "-c", told], ["sleep", "1000"]], time_limit=60, num_threads=1)
    assert (outcome.status, outcome.reason) == ("failed", "allstep: error: expected this, received that")
    assert run_job([["sh", "-c", "exit 3"]], time_limit=60, num_threads=1).reason == "ended with status 3"


def test_a_missing_launcher_is_told(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    cells = [cell(strategy="independent", ranks=1), cell(ranks=1), cell(strategy="independent", ranks=10_000)]
    reasons = dict(unavailable(cells))
    assert reasons.keys() == {cells[1].id, cells[2].id}
    assert "expected horovodrun" in reasons[cells[1].id] and "10000 ranks" in reasons[cells[2].id]
    assert "--oversubscribe" in reasons[cells[2].id]
    assert dict(unavailable(cells, oversubscribe=True)).keys() == {cells[1].id}


def test_the_rules_say_whether_ranks_share_cores():
    alone, shared = (" ".join(rules(SETTINGS, num_rounds=5, oversubscribe=shared)) for shared in (False, True))
    assert "--oversubscribe" in shared and "Each rank has a core" not in shared
    assert "--oversubscribe" not in alone and "Each rank has a core" in alone


# The machine.


def test_variables_that_matter_are_told_and_no_secret():
    environ = {
        **{"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"HOROVOD_SECRET_KEY": "x", "SLURM_JWT": "x", "TF_API_TOKEN": "x", "HOME": "x", "AWS_SESSION": "x"},
    }
    expected = {"CUDA_VISIBLE_DEVICES": "", "HOROVOD_CYCLE_TIME": "1", "OMP_NUM_THREADS": "1"}
    assert machine.variables(environ) == expected


# The whole command.


FLAGS = ("--quick", "--frameworks", "pytorch", "--strategies", "independent", "--workloads", "synthetic-weak")
CELL = "synthetic-weak.pytorch.independent.{}.cnn.64.float32"


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def launched_processes() -> set[int]:
    """All that some comparison has launched and that still runs."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"ALLSTEP_JOB=" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_an_interrupted_comparison_is_taken_up_where_it_was(tmp_path):
    directory, before = tmp_path / "results", launched_processes()
    command = [BIN / "allstep", "compare", *FLAGS, "--ranks", "1,2,999", "--output-dir", directory]
    first, second = (results.sample_path(directory, CELL.format(ranks), 0) for ranks in (1, 2))
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in told, told
    assert launched_processes() <= before
    content, gate = first.read_text(), results.gate_path(directory, "pytorch.independent.1.cnn.float32").read_text()
    assert json.loads((directory / "compare.json").read_text())["finished"] is False
    second.parent.mkdir(exist_ok=True)
    second.write_text(content[:100])  # as a full disk would leave it

    result = run(*command, timeout=300)
    assert result.returncode == 0, result.output
    [warning] = [line for line in result.stderr.splitlines() if "cannot be read" in line]
    assert str(second) in warning
    assert first.read_text() == content  # it was not measured again
    assert results.gate_path(directory, "pytorch.independent.1.cnn.float32").read_text() == gate
    assert re.findall(r"^round \d+: (\S+):", result.stderr, re.MULTILINE) == [CELL.format(2)]

    summary = json.loads((directory / "compare.json").read_text())
    one, two, many = summary["cells"]
    assert [of["status"] for of in (one, two, many)] == ["ok", "ok", "unavailable"] and summary["finished"]
    assert "received 999 ranks" in many["reason"] and "received 999 ranks" in result.stdout
    assert [of["gate"]["status"] for of in (one, two)] == ["passed", "none"]
    pair = json.loads(second.read_text())
    assert all(len(block["seconds_by_rank"]) == 2 for block in pair["blocks"])
    assert len(two["peak_memory_bytes_by_rank"]) == 2 and two["startup_seconds"]["num"] == 1
    rates = [json.loads(path.read_text())["images_per_second"] for path in (first, second)]
    assert two["efficiency"]["single_process"]["median"] == pytest.approx(rates[1] / rates[0] / 2)
    assert summary["environment"]["versions"]["torch"] and len(summary["rules"]) > 8

    for flags, expected in ((("--quick", "--base-lr", "0.5"), "base-lr"), ((), "version 7")):
        if not flags:
            (directory / "compare.json").write_text(json.dumps({**summary, "version": 7}))
        result = run(*command, *flags, timeout=300)
        assert (result.returncode, result.stdout) == (2, "")
        assert expected.replace("version ", "allstep-compare ") in result.stderr and "--output-dir" in result.stderr


def test_what_belongs_to_no_readable_comparison_is_measured_again(tmp_path, monkeypatch, capsys):
    """compare.json says by which settings samples were measured: without it nobody knows."""
    monkeypatch.setattr(session, "unavailable", lambda *_, **__: ())
    of = cell(ranks=1)

    def status() -> str:
        comparison = Comparison(tmp_path, [of], SETTINGS, num_rounds=1, time_limit=1, command="allstep compare")
        return comparison.write(finished=False)["cells"][0]["status"]

    assert status() == "pending"
    begun = json.loads((tmp_path / "compare.json").read_text())["created"]
    sample = {"created": begun, **made(of, 0, output([1.0]))}
    results.write(results.sample_path(tmp_path, of.id, 0), sample)
    assert status() == "ok"
    whole = (tmp_path / "compare.json").read_text()
    for broken, expected in ((whole[:100], "cannot be read"), ('{"format": "allstep-compare", "version": 1}', "lacks")):
        (tmp_path / "compare.json").write_text(broken)
        monkeypatch.setattr(session, "_now", lambda: "a later time")
        assert status() == "pending"
        [line] = capsys.readouterr().err.splitlines()
        assert expected in line and "compare.json" in line


def test_a_cell_that_hangs_is_ended_and_marked(tmp_path):
    """No interpreter imports PyTorch and trains in a second."""
    before = launched_processes()
    command = ("allstep", "compare", *FLAGS, "--ranks", "1", "--time-limit", "1", "--output-dir", tmp_path)
    result = run(*command, timeout=300)
    assert result.returncode == 1 and "no cell could be measured" in result.stderr
    assert "took longer than 1 s and was ended" in result.stdout
    sample = json.loads(results.sample_path(tmp_path, CELL.format(1), 0).read_text())
    assert sample["status"] == "timeout"
    assert launched_processes() <= before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategies", "horovod,dpp"], "'dpp'"),
        (["--repetitions", "4"], "'4'"),  # fewer than the rules ask for
        (["--workloads", "weak"], "'weak'"),
        (["--target-accuracy", "97"], "received 97"),
    ],
)
def test_a_mistake_is_one_line(arguments, expected):
    with pytest.raises(UserError, match=expected) as caught:
        call(["compare", *arguments])
    assert "\n" not in str(caught.value)


def test_a_note_tells_all_that_stands_against_a_cell():
    of = {"status": "partial", "reason": "it hung", "images_per_second": {"median": 1}, "comparable": False}
    of |= {"gate": {"reason": "its curve differs"}}
    assert note(of) == "partial: it hung; not compared: its curve differs"
    assert note({**of, "status": "failed", "images_per_second": None}) == "failed: it hung"
    assert note({**of, "status": "ok", "comparable": True}) == ""


def test_settings_are_those_of_the_command_line():
    """Every setting is a flag, so that a comparison can be repeated by its command."""
    told = run("allstep", "compare", "--help").stdout
    assert all(f"--{item.name.replace('_', '-')}" in told for item in dataclasses.fields(Settings))
    assert os.environ.get("ALLSTEP_JOB") is None


# Two comparisons.


def a_cell(strategy: str, share: float) -> dict:
    place = {"workload": "synthetic-weak", "framework": "pytorch", "model": "cnn", "batch_size": 64, "ranks": 2}
    efficiency = {"independent": {"median": share}}
    return {"id": f"{strategy}.2", "strategy": strategy, "precision": "float32", "efficiency": efficiency, **place}


@pytest.mark.parametrize(
    ("again", "holds"), [((0.92, 0.84), True), ((0.92, 0.70), False), ((0.86, 0.87), False)], ids=str
)
def test_a_repeated_comparison_holds_within_five_percent_and_in_the_same_order(tmp_path, monkeypatch, again, holds):
    for name, shares in (("first", (0.9, 0.85)), ("second", again)):
        cells = [a_cell(*one) for one in zip(("horovod", "ddp"), shares, strict=True)]
        limit = {**a_cell("independent", 1.0), "id": "independent.2"}
        results.write(tmp_path / name / results.SUMMARY, {"cells": [limit, *cells]})
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path / "first"), str(tmp_path / "second")])
    with pytest.raises(SystemExit) as ended:
        repeated.main()
    assert ended.value.code == (0 if holds else 1)


def test_a_repetition_of_a_broken_comparison_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "compare.json").write_text('{"format": "allstep-compare", "ver')
    monkeypatch.setattr("sys.argv", ["repeated", str(tmp_path), str(tmp_path)])
    with pytest.raises(UserError, match="expected a readable allstep-compare file.*compare.json"):
        repeated.main()
    assert capsys.readouterr().err == ""
