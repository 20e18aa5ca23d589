"""`allstep compare`: real cells that succeed, hang, are interrupted and are resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from compared import SETTINGS, TEST, cell, launched_processes, made, output
from ranks import BIN, environment, run

from allstep.commands.cli import call
from allstep.commands.compare import measuring
from allstep.commands.compare.cells import Settings
from allstep.commands.compare.measuring import Comparison, gate_path, sample_path
from allstep.commands.shared.jobs import Outcome
from allstep.commands.shared.records import files
from allstep.common.base.errors import UserError

FLAGS = ("--quick", "--frameworks", "pytorch", "--strategies", "independent", "--workloads", "synthetic-weak")
CELL = "synthetic-weak.pytorch.independent.{}.cnn.64.float32"


def test_an_interrupted_comparison_is_taken_up_where_it_was(tmp_path):
    directory = tmp_path / "results"
    command = [BIN / "allstep", "compare", *FLAGS, "--no-turns", "--ranks", "1,2,999", "--output-dir", directory]
    first, second = (sample_path(directory, CELL.format(ranks), 0) for ranks in (1, 2))
    started_with = environment(**{TEST: str(tmp_path)})
    process = subprocess.Popen(command, env=started_with, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in printed, printed
    assert not launched_processes(str(tmp_path))
    content, gate = first.read_text(), gate_path(directory, "pytorch.independent.1.cnn.float32").read_text()
    assert json.loads((directory / "compare.json").read_text())["finished"] is False
    second.parent.mkdir(exist_ok=True)
    second.write_text(content[:100])  # as a full disk would leave it

    result = run(*command, timeout=300)
    assert result.returncode == 0, result.output
    [warning] = [line for line in result.stderr.splitlines() if "cannot be read" in line]
    assert str(second) in warning
    assert first.read_text() == content  # it was not measured again
    assert gate_path(directory, "pytorch.independent.1.cnn.float32").read_text() == gate
    assert re.findall(r"^round \d+: (\S+):", result.stderr, re.MULTILINE) == [CELL.format(2)]

    summary = json.loads((directory / "compare.json").read_text())
    one, two, many = summary["cells"]
    assert [of["status"] for of in (one, two, many)] == ["ok", "ok", "unavailable"] and summary["finished"]
    assert "received 999 ranks" in many["reason"] and "received 999 ranks" in result.stdout
    assert [of["gate"]["status"] for of in (one, two)] == ["passed", "none"]
    pair = json.loads(second.read_text())
    assert all(len(block["seconds_by_rank"]) == 2 for block in pair["blocks"])
    assert len(two["peak_memory_bytes_by_rank"]) == 2 and two["startup_seconds"]["num"] == 1
    alone, together = (blocks_rates(path) for path in (first, second))
    expected = statistics.geometric_mean(together) / statistics.geometric_mean(alone) / 2
    assert two["efficiency"]["single_process"]["median"] == pytest.approx(expected)
    assert summary["environment"]["versions"]["torch"] and len(summary["rules"]) > 8

    for flags, expected in ((("--quick", "--base-lr", "0.5"), "base-lr"), ((), "version 7")):
        if not flags:
            (directory / "compare.json").write_text(json.dumps({**summary, "version": 7}))
        result = run(*command, *flags, timeout=300)
        assert (result.returncode, result.stdout) == (2, "")
        assert expected.replace("version ", "allstep-compare ") in result.stderr and "--output-dir" in result.stderr


def test_ctrl_c_ends_jobs_that_take_turns(tmp_path):
    """Horovod's ranks are stopped outside their turn, so they do not receive signals at once."""
    what = ("--frameworks", "pytorch", "--strategies", "horovod", "--workloads", "real-weak", "--ranks", "2")
    command = [BIN / "allstep", "compare", "--quick", *what, "--output-dir", tmp_path / "results"]
    # Stopped processes are found by their variables in /proc, which forks do not show.
    started_with = environment(**{TEST: str(tmp_path), "WARM_FOLDER": ""})
    process = subprocess.Popen(command, env=started_with, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 240
    while not stopped(launched_processes(str(tmp_path))) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.3)  # looking at all processes takes a while; a turn takes longer
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in printed, printed
    assert not launched_processes(str(tmp_path))
    result = run(*command, timeout=300)
    assert result.returncode == 0, result.output
    summary = json.loads((tmp_path / "results" / "compare.json").read_text())
    assert [cell["status"] for cell in summary["cells"]] == ["ok"] * 4
    share = summary["cells"][-1]["efficiency"]["independent"]
    horovod, limit = (
        blocks_rates(sample_path(tmp_path / "results", cell["id"], 0))
        for cell in (summary["cells"][-1], summary["cells"][1])
    )
    assert share["median"] == pytest.approx(statistics.geometric_mean(horovod) / statistics.geometric_mean(limit))


def blocks_rates(sample: Path) -> list[float]:
    return [block["images_per_second"] for block in json.loads(sample.read_text())["blocks"]]


def stopped(pids: set[int]) -> set[int]:
    """Return those processes that are stopped (proc(5): state T)."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                found.add(pid)
    return found


def test_what_belongs_to_no_readable_comparison_is_measured_again(tmp_path, monkeypatch, capsys):
    """Only compare.json tells by which settings samples were measured."""
    monkeypatch.setattr(measuring, "unavailable", lambda *_, **__: ())
    of = cell(ranks=1)

    def status() -> str:
        comparison = Comparison(tmp_path, [of], SETTINGS, num_rounds=1, time_limit=1, command="allstep compare")
        return comparison.write(finished=False).cells[0].status

    assert status() == "pending"
    begun = json.loads((tmp_path / "compare.json").read_text())["created"]
    sample = dataclasses.replace(made(of, 0, output([1.0])), created=begun)
    files.write(sample_path(tmp_path, of.id, 0), sample)
    assert status() == "ok"
    whole = (tmp_path / "compare.json").read_text()
    hollow = '{"format": "allstep-compare", "version": 2}'
    for broken, expected in ((whole[:100], "cannot be read"), (hollow, "to have created")):
        (tmp_path / "compare.json").write_text(broken)
        monkeypatch.setattr(files, "now", lambda: "a later time")
        assert status() == "pending"
        [line] = capsys.readouterr().err.splitlines()
        assert expected in line and "compare.json" in line


def test_a_log_says_where_a_comparison_stands(tmp_path, monkeypatch, capsys):
    """The launches are made up: each has its turns and fails."""

    def run_in_turn(launches, *, watch, **_):
        for number, _ in enumerate(launches):
            watch(number, 0)
        for number, _ in enumerate(launches):
            watch(number, 1)
        return [Outcome("failed", "of course", 0.0, 1.0, "")] * len(launches)

    monkeypatch.setattr(measuring, "unavailable", lambda *_, **__: ())
    monkeypatch.setattr(measuring, "run_in_turn", run_in_turn)
    cells = [cell(strategy="horovod", ranks=ranks) for ranks in (1, 2)]
    Comparison(tmp_path, cells, SETTINGS, num_rounds=1, time_limit=1, command="allstep compare").run()
    lines = [line.replace(", less than a minute left", " (left)") for line in capsys.readouterr().err.splitlines()]
    ids = [one.id for one in cells]
    assert [line for line in lines if "of course" not in line] == [
        "gate: curve 1 of 2",
        "gate: curve 2 of 2 (left)",
        f"cell 1 of 2: {ids[0]} (left)",
        f"cell 2 of 2: {ids[1]} (left)",
    ]
    assert [line for line in lines if line.startswith("round")] == [f"round 1: {one}: of course" for one in ids]


@pytest.mark.cold
def test_a_cell_that_hangs_is_ended_and_marked(tmp_path):
    """No interpreter imports PyTorch and trains within a second."""
    command = ("allstep", "compare", *FLAGS, "--ranks", "1", "--time-limit", "1", "--output-dir", tmp_path)
    result = run(*command, timeout=300, **{TEST: str(tmp_path)})
    assert result.returncode == 1 and "no cell could be measured" in result.stderr
    assert "took longer than 1 s and was ended" in result.stdout
    sample = json.loads(sample_path(tmp_path, CELL.format(1), 0).read_text())
    assert sample["status"] == "timeout"
    assert not launched_processes(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategies", "horovod,dpp"], "received dpp"),
        (["--repetitions", "4"], "received 4"),  # fewer than the rules require
        (["--workloads", "weak"], "received weak"),
        (["--target-accuracy", "97"], "received 97"),
    ],
)
def test_a_mistake_is_one_line(arguments, expected):
    with pytest.raises(UserError, match=expected) as caught:
        call(["compare", *arguments])
    assert "\n" not in str(caught.value)


def test_settings_are_those_of_the_command_line():
    """Every setting is a flag, so that its command can repeat a comparison."""
    printed = run("allstep", "compare", "--help").stdout
    assert all(f"--{item.name.replace('_', '-')}" in printed for item in dataclasses.fields(Settings))
    assert os.environ.get("ALLSTEP_JOB") is None
