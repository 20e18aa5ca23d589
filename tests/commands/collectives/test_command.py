"""Collectives and timelines. Oracles: nccl-tests' formulas, MPI's standard, a hand-made timeline, and real ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from ranks import launch, run

from allstep.commands.collectives import command as collectives
from allstep.commands.collectives.backends import COLLECTIVES, Library, horovod_settings, worker
from allstep.commands.collectives.backends.horovod_settings import Costs
from allstep.commands.shared.jobs import LAUNCHERS
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import OverMpi, OverRanks, RankResult, RankRow
from allstep.commands.timeline import command as timeline
from allstep.common.base.errors import Fault, UserError


def test_bandwidths_are_those_of_nccl_tests():
    """Oracle: doc/PERFORMANCE.md of nccl-tests, for 1 GB in 0.1 s on 4 ranks."""
    for collective, factor in zip(COLLECTIVES, (1.5, 0.75, 1, 0.75, 0.75), strict=True):
        assert collectives.bus_bandwidth(collective, 10**9, 0.1, 4) == pytest.approx(factor * 1e10), collective


def test_values_repeat_and_tell_the_ranks_apart():
    """Oracle: the definition of the values, position by position."""
    for rank, count in ((0, 1), (1, 13), (2, 100)):
        wanted = [float(position % 13 + 13 * rank + 1) for position in range(count)]
        assert worker.given("all-reduce", count, rank, 3).tolist() == wanted
        assert worker.given("all-reduce", count, rank, 3).dtype == np.float32


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_expected_results(collective):
    """Oracle: the MPI standard's definition of each collective, spelled out for 3 ranks of 6 elements."""
    given = [worker.given(collective, 6, rank, 3) for rank in range(3)]
    total = given[0] + given[1] + given[2] if collective in ("all-reduce", "reduce-scatter") else None
    for rank in range(3):
        wanted = {
            "all-reduce": total,
            "reduce-scatter": total[2 * rank : 2 * rank + 2] if total is not None else None,
            "all-gather": np.concatenate(given),
            "broadcast": given[0],
            "all-to-all": np.concatenate([array[2 * rank : 2 * rank + 2] for array in given]),
        }[collective]
        np.testing.assert_array_equal(worker.expected(collective, 6, rank, 3), wanted)
        assert worker.expected(collective, 6, rank, 3).dtype == np.float32
        # A rank that kept its input, or got another rank's, is noticed.
        assert collective == "broadcast" or not np.array_equal(given[rank], wanted)


def test_every_library_on_real_ranks(tmp_path):
    """Each library is started by its own launcher; all results are right, and missing collectives are reported."""
    output = tmp_path / "out" / "collectives.json"
    result = run("allstep", "collectives", "--rounds", "1", "--sizes", "8,4096", "--output", output, timeout=280)
    assert result.returncode == 0, result.output
    content = json.loads(output.read_text())
    measured = {(row["backend"], row["collective"]) for row in content["rows"]}
    libraries = ("mpi4py", "horovod-torch", "horovod-tensorflow", "torch-gloo", "tf-distribute")
    assert {name for name, _ in measured} == {"memcpy", *libraries}
    for library in libraries:
        has = {collective for name, collective in measured if name == library}
        assert has | set(content["missing"][library]) == set(COLLECTIVES)
    assert content["missing"]["tf-distribute"] == ["broadcast", "reduce-scatter", "all-to-all"]
    for row in content["rows"]:
        assert row["right"] and 0 < row["seconds"]["minimum"] <= row["seconds"]["average"] <= row["seconds"]["maximum"]
        bandwidth = collectives.bus_bandwidth(row["collective"], row["bytes"], row["seconds"]["average"], 2)
        assert row["bus_bandwidth"] == pytest.approx(bandwidth)
    assert {row["bytes"] for row in content["horovod_over_mpi"]} == {8, 4096}
    assert "HOROVOD_FUSION_THRESHOLD=" in result.stdout and "right" in result.stdout


WRONG = """
import pathlib, sys
from allstep.commands.collectives.backends import mpi, worker
class Wrong(mpi.Mpi):
    def all_reduce(self, array):
        operation = super().all_reduce(array)
        def result():
            found = operation.result()
            if self.rank == 1:
                found[-1] += 1
            return found
        return type(operation)(operation.run, result)
worker.measure(Wrong(), ["all-reduce", "broadcast"], [4096], pathlib.Path(sys.argv[1]))
"""


def test_a_wrong_result_is_noticed(tmp_path):
    """One element on one rank is off by one."""
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    result = launch("mpirun", 2, script, tmp_path)
    assert result.returncode == 0, result.output
    ranks = [files.read_json(RankResult, tmp_path / f"rank-{rank}.json") for rank in range(2)]
    rows = collectives.summed_up("mpi4py", [[rank.rows for rank in ranks]])
    assert [(row.collective, row.right) for row in rows] == [("all-reduce", False), ("broadcast", True)]


@pytest.mark.launch
def test_a_library_that_fails_is_named_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    """The launcher of the library is not installed."""
    monkeypatch.setitem(LAUNCHERS, "broken", ("no-such-launcher",))
    monkeypatch.setitem(collectives.BACKENDS, "mpi4py", Library("mpi", "Mpi", "broken"))
    output = tmp_path / "collectives.json"
    with pytest.raises(SystemExit):
        collectives.main(["--backends", "memcpy,mpi4py", "--sizes", "8", "--rounds", "1", "--output", str(output)])
    content = json.loads(output.read_text())
    assert "no-such-launcher" in content["failures"]["mpi4py"] and content["rows"][0]["backend"] == "memcpy"
    assert "mpi4py: failed" in capsys.readouterr().err


HANG = "trap '' TERM; touch $$; exec sleep 1000"  # a shell starts in time on any machine


def test_a_library_that_hangs_is_ended_with_its_ranks(tmp_path, monkeypatch):
    """The ranks have their own session, as with mpirun: no signal to the launcher's process group reaches them."""
    (tmp_path / "hang.sh").write_text(HANG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(LAUNCHERS, "hanging", ("setsid", "--wait", "sh", "hang.sh"))
    monkeypatch.setitem(collectives.BACKENDS, "mpi4py", Library("mpi", "Mpi", "hanging"))
    with pytest.raises(Fault, match="took longer than 5 s and was ended"):
        collectives.launch("mpi4py", ["all-reduce"], [8], 1, time_limit=5)
    [rank] = [path.name for path in tmp_path.iterdir() if path.name.isdecimal()]
    command = Path("/proc", rank, "cmdline")
    assert not command.exists() or not command.read_bytes()  # a zombie has an empty command line


@pytest.mark.parametrize("kind", ["folder", "pipe", "in a file"])
def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, monkeypatch, kind):
    """A pipe stands for /dev/null, which a file must not replace."""
    monkeypatch.setattr(collectives, "launch", lambda *_, **__: pytest.fail("measured"))
    output = tmp_path / "output"
    if kind == "folder":
        output.mkdir()
    elif kind == "pipe":
        os.mkfifo(output)
    else:
        output.touch()
        output = output / "collectives.json"
    with pytest.raises(
        UserError, match=f"expected --output to be a file that can be written, received {output}"
    ) as caught:
        collectives.main(["--output", str(output)])
    assert "\n" not in str(caught.value)


def test_times_over_ranks_and_passes():
    """The fastest pass of all rounds counts as a whole, not the fastest of each rank."""

    def rows(*seconds: float) -> tuple[RankRow, ...]:
        return (RankRow("all-reduce", 1000, True, seconds),)

    rounds = [[rows(1.0, 10.0), rows(9.0, 30.0)], [rows(20.0, 2.0), rows(30.0, 4.0)]]
    [row] = collectives.summed_up("mpi4py", rounds)
    assert row.seconds == OverRanks(2.0, 3.0, 4.0) and row.bus_bandwidth == 1000 / 3
    assert row.median_seconds == (5.0 + 20.0) / 2 and row.passes == ((1, 9), (10, 30), (20, 30), (2, 4))
    [of_horovod] = collectives.summed_up("horovod-torch", [[rows(8.0, 6.0), rows(8.0, 6.0)]])
    [ratio] = collectives.horovod_over_mpi([row, of_horovod])
    assert ratio == OverMpi("horovod-torch", 1000, 0.5, 12.5 / 7.0)


def test_recommendations_follow_the_costs():
    """Expensive messages and cheap copies call for fusion; cheap messages and expensive copies do not."""
    fused = horovod_settings.recommend(Costs(latency=1e-2, bandwidth=1e12, copy_bandwidth=1e12), "cnn", 40)
    assert fused.threshold >= 2**20 and fused.simulated_seconds < fused.simulated_seconds_without_fusion
    slow_copies = Costs(latency=0.0, bandwidth=1e12, copy_bandwidth=1e6)
    assert horovod_settings.recommend(slow_copies, "resnet50", 40).threshold == 0
    with pytest.raises(UserError, match="resnet50"):
        horovod_settings.recommend(slow_copies, "nosuch", 40)


@pytest.mark.full
def test_a_recommendation_is_tried_out_on_real_ranks(tmp_path):
    """The file has the settings before and after, the training speed with each, and their ratios."""
    output = tmp_path / "collectives.json"
    flags = ("--backends", "memcpy,horovod-torch", "--collectives", "all-reduce", "--sizes", "8,1048576")
    network = ("--rounds", "1", "--network", "mlp", "--step-ms", "3", "--tune")
    result = run("allstep", "collectives", *flags, *network, "--output", output, timeout=300)
    assert result.returncode == 0, result.output
    content = json.loads(output.read_text())
    found, tuning = content["recommendation"], content["tuning"]
    assert found["simulated_seconds"] <= found["simulated_seconds_by_default"]
    assert tuning["settings"]["default"] == {}
    assert tuning["settings"]["recommended"] == {
        "HOROVOD_FUSION_THRESHOLD": f"{found['threshold']:.0f}",
        "HOROVOD_CYCLE_TIME": f"{found['cycle_ms']:g}",
    }
    rates = {name: rate for name, [rate] in tuning["images_per_second"].items()}
    assert rates.keys() == tuning["settings"].keys() and all(rate > 0 for rate in rates.values())
    ours = rates.pop("recommended")
    for name, rate in rates.items():
        assert tuning["ratios"][f"recommended / {name}"] == pytest.approx(ours / rate)
        assert f"recommended / {name}: {ours / rate:.3f}" in result.stdout


@pytest.mark.parametrize(
    "flags",
    [
        *(["--backends", "nosuch"], ["--sizes", "0"], ["--ranks", "x"], ["--collectives", "sum"]),
        *(["--network", "nosuch"], ["--network", "vgg16", "--tune"]),
    ],
)
def test_mistakes(flags):
    with pytest.raises(UserError, match="expected"):
        collectives.main(flags)


def written_timeline() -> list[dict]:
    """Return two steps of two gradients: b is ready at 100, a at 300; they are reduced at 200 to 400 and 400 to 500."""
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in ((1, "a"), (2, "b"))
    ]
    for base in (0, 1000):
        for pid, ready, turn, begins, ends in ((2, 100, 150, 200, 400), (1, 300, 350, 400, 500)):
            for phase, name, at in (
                ("B", "NEGOTIATE_ALLREDUCE", ready), ("E", "", turn), ("B", "ALLREDUCE", turn),
                ("B", "MPI_ALLREDUCE", begins), ("E", "", ends), ("E", "", ends),
            ):  # fmt: skip
                events.append({"ph": phase, "name": name, "pid": pid, "ts": base + at})
    return events


def test_a_timeline_by_hand(tmp_path, capsys):
    """The ways take 300 and 200 us: 100 negotiating, 100 queueing, 300 reducing, 100 of which overlap backward."""
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(written_timeline()))
    found = timeline.summary(timeline.read_ways(path))
    assert (found.num_steps, found.num_tensors) == (2, 2)
    assert found.shares == pytest.approx({"negotiation": 0.2, "queue": 0.2, "copy": 0.0, "reduction": 0.6})
    assert found.reduction_seconds == pytest.approx(300e-6) and found.overlap == pytest.approx(1 / 3)
    text = path.read_text()
    path.write_text(text[: text.rindex("{") - 2] + ", {")  # as a killed run leaves it
    cut = timeline.summary(timeline.read_ways(path))
    assert (cut.num_steps, cut.num_tensors, cut.overlap) == (1, 2, pytest.approx(1 / 3))
    timeline.main([str(path)])
    assert "33% of it during backward" in capsys.readouterr().out


BEGIN, END = {"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 1}, {"ph": "E", "pid": 1, "ts": 2}


@pytest.mark.parametrize(
    "foreign",
    [
        *("", "{}", "[]", "[1]", "[", '{"traceEvents": []}'),
        *([BEGIN], [END], [{"ph": "X", "name": "cudaLaunchKernel", "ts": 1, "dur": 3}], [{**BEGIN, "name": "x"}, END]),
        *([{"ph": "B", "pid": 1, "ts": 1}], [{"ph": "B", "pid": 1, "name": "x"}], [BEGIN, {"ph": "E", "pid": 1}]),
        *([{**BEGIN, "ts": "soon"}], [{**BEGIN, "pid": [1]}], [{**BEGIN, "name": 3}, END], [{"ph": "M", "args": None}]),
    ],
    ids=str,
)
def test_a_foreign_trace_is_refused_in_one_line(tmp_path, foreign):
    """Other profilers write Chrome's format with other names and without some keys."""
    path = tmp_path / "trace.json"
    path.write_text(foreign if isinstance(foreign, str) else json.dumps(foreign))
    with pytest.raises(UserError, match=f"expected a Horovod timeline.*{path.name}") as caught:
        timeline.main([str(path)])
    assert "\n" not in str(caught.value)


def test_a_timeline_without_names_or_length_has_a_summary(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([BEGIN, {**END, "ts": BEGIN["ts"]}]))
    found = timeline.summary(timeline.read_ways(path))
    assert (found.num_steps, found.num_tensors, found.reduction_seconds) == (1, 1, 0.0)


def test_timeline_and_autotune_of_a_trainer(tmp_path):
    """Horovod writes the timeline of a real training run; all gradients are reduced together, once per step."""
    path = tmp_path / "new" / "timeline.json"
    flags = ("--epochs", "1", "--model", "mlp", "--batch-size", "64", "--timeline", path, "--autotune")
    result = launch("mpirun", 2, "pytorch/train.py", *flags)
    assert result.returncode == 0, result.output
    found = timeline.summary(timeline.read_ways(path))
    # 1437 digits in batches of 128; all weights and biases. Horovod drops events it has not written when it ends.
    assert 8 <= found.num_steps <= 12 and found.num_tensors == 1
    assert sum(found.shares.values()) == pytest.approx(1) and 0 <= found.overlap <= 1
