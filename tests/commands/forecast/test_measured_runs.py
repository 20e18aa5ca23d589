"""Forecasts from runs, links and comparisons. Oracles: results made up with known costs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from compared import SETTINGS, cell, comparison, estimate, made, output, result
from reported import EPOCHS, START

from allstep.commands.compare.records import SUMMARY, ComparisonResult
from allstep.commands.forecast import command, measured_runs
from allstep.commands.forecast.flags import parse
from allstep.commands.forecast.forecast import Workload, forecast
from allstep.commands.forecast.networks import known_networks
from allstep.commands.forecast.parameters import fitted
from allstep.commands.forecast.question import read_question
from allstep.commands.forecast.site import Site
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult, OverRanks, Row
from allstep.common.base.errors import UserError


def local_results(
    directory: Path, rates: dict[tuple[str, int], float], block_seconds: Sequence[float] = (1.0, 1.0)
) -> list[str]:
    """Return flags for a comparison with these images/s by strategy and ranks, and links of 1 GB/s on 2 and 4 ranks.

    `block_seconds` are the seconds of each block, of 4 steps, of a launch of independent processes.
    """
    sample = made(cell(strategy="independent"), 0, output(*([0.1 * seconds] for seconds in block_seconds)))
    files.write(directory / "independent.json", sample)
    cells = []
    for (strategy, ranks), rate in rates.items():
        single_process = estimate(rate / ranks / rates["independent", 1])
        cells.append(
            result(
                cell(strategy=strategy, ranks=ranks),
                samples=("independent.json",) if strategy == "independent" else (),
                images_per_second=estimate(rate),
                efficiency={"single_process": single_process},
            )
        )
    cells.append(result(cell(strategy="ddp"), comparable=False, images_per_second=None))
    settings = dataclasses.replace(SETTINGS, num_batches_per_iter=4)
    files.write(directory / SUMMARY, dataclasses.replace(comparison(*cells), settings=settings))
    paths = []
    for ranks in (2, 4):
        paths.append(directory / f"collectives-{ranks}.json")
        rows = tuple(
            Row("mpi4py", "all-reduce", size, OverRanks(seconds, seconds, seconds), seconds, 1e9, 1e9, right=True)
            for size, seconds in ((8, 1e-5), (2**24, 2**24 / 1e9))
        )
        links = CollectivesResult(ranks=ranks, command="", variables={}, rows=rows, missing={}, failures={})
        files.write(paths[-1], links)
    return ["--validate", "--measured", str(directory), "--collectives", ",".join(map(str, paths))]


LIMITS = {("independent", 1): 1000.0, ("independent", 2): 2000.0, ("independent", 4): 2000.0}


def test_own_runs_beside_forecasts(tmp_path, capsys):
    """4.8 MB at 1 GB/s take 4.8 ms, not hidden on CPUs; a step takes 64 ms, or 128 ms where 4 ranks share 2 cores."""
    steps = {1: 64.0, 2: 64.0 + 4.8, 4: 128.0 + 4.8}
    horovod = {("horovod", ranks): ranks * 64_000 / step for ranks, step in steps.items()}
    flags, output = local_results(tmp_path, {**LIMITS, **horovod}), tmp_path / "new" / "validation.json"
    command.main([*flags, "--output", str(output)])
    assert "own runs" in capsys.readouterr().out
    content = json.loads(output.read_text())
    own = {row["num_ranks"]: row for row in content["rows"] if row["title"].startswith("own runs")}
    assert own.keys() == steps.keys() and content["notes"]
    for num_ranks, row in own.items():
        assert row["measured"] == pytest.approx(64 / steps[num_ranks])
        assert row["forecast"] == pytest.approx(64 / steps[num_ranks], abs=0.005) and row["within"]


def test_a_miss_is_said(tmp_path, capsys):
    """A third of the speed is lost, which no model of the link explains."""
    flags, output = local_results(tmp_path, {**LIMITS, ("horovod", 2): 1300.0}), tmp_path / "validation.json"
    with pytest.raises(SystemExit) as ended:
        command.main([*flags, "--output", str(output)])
    assert ended.value.code == 1 and "NO" in capsys.readouterr().out
    [missed] = [row for row in json.loads(output.read_text())["rows"] if not row["within"] and row["low"] is None]
    assert missed["error"] == pytest.approx(64 / 68.8 - 0.65, abs=0.005)
    with pytest.raises(UserError, match=r"collectives on 2 ranks for \S*horovod.2\S*, received those on 4"):
        command.main([*flags[:-1], str(tmp_path / "collectives-4.json")])


def test_a_comparison_that_is_not_whole_is_refused_in_one_line(tmp_path):
    flags = local_results(tmp_path, {**LIMITS, ("horovod", 2): 1860.0})
    (tmp_path / "independent.json").unlink()
    with pytest.raises(UserError, match="expected a sample of allstep compare, received .*independent.json") as caught:
        command.main(flags)
    assert "\n" not in str(caught.value)
    (tmp_path / "compare.json").write_text('{"format": "allstep-compare", "version": 2}')
    with pytest.raises(UserError, match="expected result to have created, received"):
        command.main(flags)


def test_ranks_wait_for_the_slowest_in_each_step_and_not_in_each_block_of_steps(tmp_path):
    """Blocks of 4 steps deviate by a tenth, so steps by a fifth; the larger of two lies 1 / sqrt(pi) deviations up.

    Two processes at once take 1.2 times as long as one, and the slower one of them counts.
    """
    crowded, block_delay, step_delay = 1.2, 1 + 0.1 / math.sqrt(math.pi), 1 + 0.2 / math.sqrt(math.pi)
    rates = {("independent", 1): 1000.0, ("independent", 2): 2000.0 / crowded / block_delay, ("horovod", 2): 1500.0}
    local_results(tmp_path, rates, block_seconds=(0.9, 1.0, 1.1))
    [row] = measured_runs.check_compare(tmp_path, [tmp_path / "collectives-2.json"])
    assert row.forecast == pytest.approx(64 / (64 * crowded * step_delay + 4.8), abs=0.002)


def test_times_between_measured_sizes():
    times = [(100, 1.0), (200, 3.0), (400, 4.0)]
    assert [measured_runs.interpolated(times, size) for size in (1, 100, 150, 400, 800)] == [1, 1, 2, 4, 8]


def test_a_measured_run(tmp_path, capsys):
    run = tmp_path / "metrics.jsonl"
    start = {**START, "world_size": 1, "parameter_count": 1_199_882}

    def run_with_rates(*rates: float) -> measured_runs.MeasuredRun:
        epochs = [{**EPOCHS[0], "images_per_second": rate} for rate in rates]
        run.write_text("".join(json.dumps(event) + "\n" for event in [start, *epochs]))
        return measured_runs.read_run(tmp_path)

    assert run_with_rates(100.0, 640.0) == measured_runs.MeasuredRun(
        pytest.approx(0.1), 64, 1_199_882, None, strategy="horovod"
    )
    # Epochs of 0.9, 1 and 1.1 times 0.1 s a step: a standard deviation of a tenth of the mean.
    assert run_with_rates(1.0, 640 / 0.9, 640.0, 640 / 1.1).jitter == pytest.approx(0.1)
    for flags, jitter in (([], "10.0%"), (["--jitter", "0.03"], "3.0%"), (["--jitter", "0"], "0.0%")):
        command.main(["--run", str(tmp_path), *flags])
        assert f"jitter {jitter}" in capsys.readouterr().out
    run_with_rates(100.0, 640.0)
    command.main(["--run", str(tmp_path)])
    assert f"jitter {fitted().values.jitter:.1%} (fitted)" in capsys.readouterr().out
    epochs = [{**EPOCHS[0], "images_per_second": 640.0, "gradient_noise_scale": scale} for scale in (70.0, 128.0)]
    run.write_text("".join(json.dumps(event) + "\n" for event in [start, *epochs, EPOCHS[0]]))
    printed = []
    for flags in ((), ("--critical-batch", "128")):  # the last measured value is used
        command.main(["--run", str(tmp_path), "--samples", "60000", *flags])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "critical batch 128 samples" in printed[0]
    start = {**start, "world_size": 8, "local_size": 4, "global_batch_size": 512, "device": "cuda"}
    found = run_with_rates(1.0, 640.0)
    assert (found.num_ranks, found.ranks_per_node, found.batch_size, found.device) == (8, 4, 64, "cuda")
    start["global_batch_size"] = 513
    with pytest.raises(UserError, match="the same batch on each rank"):
        run_with_rates(1.0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "readable"), ('{"format": "allstep-compare", "version": 1}', "received allstep-compare 1"), ("[1]", "list")],
)
def test_results_of_another_version_or_half_written(tmp_path, content, expected):
    (tmp_path / "compare.json").write_text(content)
    with pytest.raises(UserError, match=expected):
        files.read_input(ComparisonResult, tmp_path / "compare.json")


def write_run(directory: Path, num_ranks: int, step_seconds: float, **changed: object) -> str:
    """Write a run of ResNet-50 on GPUs, eight a host and 32 images each."""
    directory.mkdir()
    start = {**START, "world_size": num_ranks, "local_size": min(num_ranks, 8), "global_batch_size": 32 * num_ranks}
    start |= {"parameter_count": 25_557_032, "device": "cuda", **changed}
    rates = [32 * num_ranks / step_seconds * factor for factor in (0.5, 0.99, 1.0, 1.01)]
    epochs = [{**EPOCHS[0], "images_per_second": rate} for rate in rates]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [start, *epochs]))
    return str(directory)


def test_runs_of_one_and_two_hosts_beat_any_default(tmp_path):
    """Oracle: a machine on which communication costs more than usual, of which the runs are all that is known."""
    true = dataclasses.replace(fitted().values, contention=0.9, tcp_contention=0.9, tcp=0.4, crowding=0.01)
    site = Site(inter_gbit=25, link="tcp")
    workload = Workload(known_networks()["resnet50"], 32, 0.1, jitter=true.jitter)
    step = {ranks: forecast(workload, site.machine(true), ranks).total for ranks in (1, 8, 16, 64)}
    runs = [write_run(tmp_path / str(ranks), ranks, step[ranks]) for ranks in (1, 8, 16)]
    flags = ["--ranks", "1,64", "--inter-gbit", "25", "--link", "tcp", "--no-control-plane"]
    rows = {}
    for number in (1, 3):
        given = [word for run in runs[:number] for word in ("--run", run)]
        command.main([*given, *flags, "--output", str(tmp_path / "found.json")])
        rows[number] = json.loads((tmp_path / "found.json").read_text())["forecasts"][1]
    errors = {number: abs(row["efficiency"] - step[1] / step[64]) for number, row in rows.items()}
    assert errors[3] < 0.04 < 0.1 < errors[1]
    assert rows[3]["low"] < step[1] / step[64] < rows[3]["high"]
    relative = [(1 / row["low"] - 1 / row["high"]) / (1 / row["efficiency"] - 0.97) for row in rows.values()]
    assert relative[1] < relative[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 1, "global_batch_size": 32}, "received two of 1; drop one"),
        ({"global_batch_size": 64}, "samples a rank 32 on 1 and 8 on 8 ranks"),
        ({"parameter_count": 3}, "parameters 25557032 on 1 and 3 on 8 ranks"),
        ({"device": "cpu"}, "device cuda on 1 and cpu on 8 ranks"),
    ],
)
def test_runs_that_do_not_compare(tmp_path, changed, message):
    runs = [write_run(tmp_path / "1", 1, 0.1), write_run(tmp_path / "8", 8, 0.11, **changed)]
    with pytest.raises(UserError, match=message) as caught:
        command.main(["--run", runs[0], "--run", runs[1]])
    assert "\n" not in str(caught.value)


def question(*words: str):
    return read_question(*parse("allstep forecast", None, list(words)))


def test_only_what_is_measured_may_be_named(tmp_path):
    """A run on one rank has a jitter, but two runs do not tell jitter from anything else."""
    one, two = (write_run(tmp_path / str(ranks), ranks, 0.1 + 0.01 * ranks) for ranks in (1, 8))
    assert question("--step-ms", "100").known_causes(8) == set()
    assert question("--run", one).known_causes(8) == {"stragglers"}
    assert question("--run", one, "--run", two).known_causes(8) == set()
    assert question("--run", one, "--run", two, "--jitter", "0.2").known_causes(8) == {"stragglers"}
    wide = question("--step-ms", "100", "--inter-gbit", "25", "--intra-us", "3")
    assert (wide.known_causes(8), wide.known_causes(16)) == ({"latency"}, {"bandwidth"})


def test_ranges_are_wider_for_what_no_publication_measured(tmp_path):
    run = write_run(tmp_path / "1", 1, 0.1, device="cpu")
    step = ("--step-ms", "100")
    assert [question(*words).widening for words in (step, (*step, "--no-overlap"), ("--run", run))] == [1, 1.5, 2]
    assert question("--run", run, "--accumulate-steps", "2").widening == 3


def test_a_run_says_how_gradients_are_exchanged(tmp_path, capsys):
    steps = {}
    for strategy in ("horovod", "ddp", "fsdp"):
        run = write_run(tmp_path / strategy, 1, 0.1, strategy=strategy)
        command.main(["--run", run, "--ranks", "64", "--output", str(tmp_path / "found.json")])
        steps[strategy] = json.loads((tmp_path / "found.json").read_text())["forecasts"][0]["step"]["communication"]
    assert len(set(steps.values())) == 3
    command.main(
        ["--run", str(tmp_path / "ddp"), "--ranks", "64", "--sharded", "--output", str(tmp_path / "found.json")]
    )
    assert json.loads((tmp_path / "found.json").read_text())["forecasts"][0]["step"]["communication"] == steps["fsdp"]


def test_a_measured_link_replaces_a_nominal_one(tmp_path, capsys):
    local_results(tmp_path, LIMITS)
    command.main(["--step-ms", "200", "--ranks", "4", "--collectives", str(tmp_path / "collectives-4.json")])
    found = " ".join(capsys.readouterr().out.split())
    assert "8 Gbit/s inside (measured)" in found and "bandwidth" in found
    for flags, message in (
        (["--intra-gbit", "8"], "--intra-gbit or --collectives of 4 ranks"),
        (["--ranks-per-node", "2", "--inter-us", "8"], "--inter-us or --collectives of 4 ranks"),
    ):
        with pytest.raises(UserError, match=message):
            command.main(["--step-ms", "200", "--collectives", str(tmp_path / "collectives-4.json"), *flags])
    with pytest.raises(UserError, match="one file of one host"):
        command.main(
            ["--step-ms", "200", "--collectives", f"{tmp_path}/collectives-4.json,{tmp_path}/collectives-2.json"]
        )
