"""Forecasts. Oracles: closed forms, random sampling of maxima, published measurements, torchvision's modules."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from compared import SETTINGS, cell, comparison, estimate, made, output, result
from reported import EPOCHS, START

from allstep.commands import cli
from allstep.commands.compare.records import SUMMARY, ComparisonResult
from allstep.commands.forecast import command
from allstep.commands.forecast import measured_runs
from allstep.commands.forecast.accuracy import epochs_needed, loss_by_parameters
from allstep.commands.forecast.allreduce import hierarchical, ring, tree
from allstep.commands.forecast.control_plane import control_plane
from allstep.commands.forecast.forecast import Machine, Workload, bottleneck, forecast, gradients, what_helps
from allstep.commands.forecast.links import Cluster, Link
from allstep.commands.forecast.networks import known_networks, read_network, uniform
from allstep.commands.forecast.simulation import Fusion, Gradient, simulate
from allstep.commands.forecast.stragglers import expected_largest
from allstep.commands.forecast.validation import PUBLISHED, check
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult, OverRanks, Row
from allstep.common.base.errors import UserError

ALPHA, BETA = 1e-5, 1e9
ONE_NODE = Cluster(1024, Link(ALPHA, BETA), Link(math.nan, math.nan))
FLAT = Cluster(1, Link(0.0, math.inf), Link(ALPHA, BETA))
IN_MEMORY = Fusion(threshold=1e12, cycle=0.0)


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.yaml")), ids=lambda path: path.stem)
def test_published_efficiencies_within_5_points(path):
    """Oracle: the measurements published by the authors of Horovod and DDP and by Goyal et al."""
    for row in check(path):
        assert row.within, row


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 512, 100_000])
def test_ring_is_the_textbooks_formula(num_ranks):
    seconds = 2 * (num_ranks - 1) * ALPHA + 2 * (num_ranks - 1) / num_ranks * 1e8 / BETA
    assert ring(1e8, num_ranks, FLAT) == pytest.approx(seconds)
    if num_ranks <= ONE_NODE.ranks_per_node:
        assert ring(1e8, num_ranks, ONE_NODE) == pytest.approx(seconds)


def test_hops_and_crossings_of_the_other_algorithms():
    cluster = Cluster(8, Link(1e-6, 100e9), Link(1e-5, 10e9))
    # 32 nodes: 5 levels; a chain of 7 hops within a node; all data cross the link between nodes twice.
    assert tree(0, 256, cluster) == pytest.approx(2 * (5 * 1e-5 + 7 * 1e-6))
    assert tree(1e9, 256, cluster) - tree(0, 256, cluster) == pytest.approx(2 * 1e9 / 10e9)
    assert hierarchical(0, 256, cluster) == pytest.approx(2 * 7 * 1e-6 + 2 * 5 * 1e-5)
    sent = 2 * 7 / 8 * 1e9 / 100e9 + 2 * 31 / 32 * 1e9 / 10e9
    assert hierarchical(1e9, 256, cluster) - hierarchical(0, 256, cluster) == pytest.approx(sent)
    assert tree(1e9, 1, cluster) == hierarchical(1e9, 1, cluster) == 0


@pytest.mark.parametrize("contention", [0.0, 1.0])
def test_simulation_without_overlap_is_the_closed_form(contention):
    """All gradients are sent in one message at the end of backward, so nothing overlaps, whatever the contention."""
    step = simulate(1.0, [Gradient(2.0, 5e8), Gradient(2.0, 5e8)], lambda size: size / BETA, fusion=IN_MEMORY)
    assert (step.total, step.compute, step.communication) == (4.0, 3.0, 1.0)
    workload = Workload(uniform(25_000_000, 1), 32, 0.2, backward_share=1.0)
    found = forecast(workload, Machine(FLAT, fusion=IN_MEMORY, contention=contention), 64)
    assert found.total == pytest.approx(found.closed_form)
    assert found.closed_form == pytest.approx(0.2 + ring(1e8, 64, FLAT))


def test_simulation_with_overlap_by_hand():
    """Two gradients at 1 s and 2 s of backward take 0.5 s each on the wire: the first is hidden, the second is not."""
    two = [Gradient(1.0, 1.0), Gradient(2.0, 1.0)]
    alone = Fusion(threshold=0, cycle=0.0)
    step = simulate(1.0, two, lambda _: 0.5, fusion=alone)
    assert (step.total, step.compute, step.communication) == (3.5, 3.0, 1.0)
    # Backward is paused during communication, as if nothing overlapped.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, contention=1.0).total == 4.0
    # At half speed, backward gets 0.25 s of work done in 0.5 s.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, contention=0.5).total == 3.75
    # The first takes 3 s; the second waits for it.
    assert simulate(1.0, two, lambda _: 3.0, fusion=alone).total == 8.0
    # Cycles start at 1, 1.7, 2.4 and 3.1: the first gradient is seen at 2.4, the second at 3.1.
    assert simulate(1.0, two, lambda _: 0.5, fusion=Fusion(0, 0.7)).total == pytest.approx(3.6)
    # The coordinator takes 0.8 s for each.
    assert simulate(1.0, two, lambda _: 0.5, fusion=alone, request=0.8).total == pytest.approx(4.3)


def test_fusion_packs_what_is_ready_up_to_the_threshold():
    ready_at_once = [Gradient(1.0, 10.0)] * 5
    for threshold, num_collectives in ((0, 5), (20, 3), (29, 3), (30, 2), (50, 1)):
        step = simulate(0.0, ready_at_once, lambda size: 1.0, fusion=Fusion(threshold, 0.0))
        assert (step.total, step.communication) == (1.0 + num_collectives, num_collectives)


def test_buckets_are_sent_when_full():
    """DDP's first bucket holds 1 MiB, the others as much as the flag says; the last one is sent partly filled."""
    mib = 2**20
    gradients_ = [Gradient(float(i), mib) for i in range(1, 7)]
    step = simulate(0.0, gradients_, lambda size: 0.1, fusion=Fusion(2 * mib, 0.0, buckets=True))
    assert (step.communication, step.total) == pytest.approx((4 * 0.1, 6.1))


def test_gradients_come_in_backward_order_and_take_their_share():
    network = known_networks()["vgg16"]
    found = gradients(network, 1.0, 2)
    sizes = [2 * layer.num_parameters for layer in reversed(network.layers)]
    assert [gradient.num_bytes for gradient in found] == sizes
    assert found[0].ready < 0.01 and found[-1].ready == 1.0  # fully connected layers compute little, and come first


@pytest.mark.parametrize("number", [2, 8, 64])
def test_the_slowest_of_many(number):
    """Oracle: random sampling."""
    chance = random.Random(0)
    drawn = statistics.fmean(max(chance.gauss() for _ in range(number)) for _ in range(4000))
    assert expected_largest(number) == pytest.approx(drawn, abs=0.05)
    assert expected_largest(1) == 0


def test_what_limits_and_what_helps():
    slow_link = Machine(Cluster(8, Link(1e-6, 100e9), Link(1e-6, 1e8)))
    workload = Workload(known_networks()["vgg16"], 32, 0.2)
    assert bottleneck(workload, slow_link, 64)[0] == "bandwidth"
    starved = Machine(Cluster(8, Link(1e-6, 100e9), Link(1e-6, 100e9)), storage_input=1000.0)
    found = forecast(workload, starved, 64)
    assert found.images_per_second == pytest.approx(1000) and bottleneck(workload, starved, 64)[0] == "input"
    assert what_helps(workload, starved, 64) == ("twice the input rate", pytest.approx(2 * found.efficiency))
    far = Machine(Cluster(1, Link(0, 1e12), Link(1e-4, 1e12)))
    assert bottleneck(workload, far, 4096)[0] == "latency" and "all-reduce" in what_helps(workload, far, 4096)[0]
    jittery = Workload(workload.network, 32, 0.2, jitter=0.1)
    assert bottleneck(jittery, Machine(Cluster(8, Link(0, 1e12), Link(0, 1e12))), 64)[0] == "stragglers"


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "connections", "percent"),
    [(64, 64, 63, 0.6), (256, 8, 38, 0.5), (1024, 8, 134, 1.1), (4096, 8, 518, 2.7), (4096, 4096, 4095, 7.8)],
)
def test_the_watch_costs_what_was_measured(num_ranks, ranks_per_host, connections, percent):
    """Oracle: the table in docs/scale.md; one host of 4,096 ranks stands for a connection per rank."""
    cluster = Cluster(ranks_per_host, Link(0.0, math.inf), Link(0.0, math.inf))
    found = control_plane(Workload(uniform(1000, 1), 32, 0.2), cluster, num_ranks, step_seconds=0.2)
    assert found.num_connections == connections
    assert 100 * found.beats == pytest.approx(percent, rel=0.15)
    assert found.stop <= (2.3 if connections == 4095 else 1.2)


def test_the_replica_check_and_a_resumed_state_by_hand():
    """100 tensors of 8 bytes from each of 1,024 other ranks, at 1 GB/s and 10 us; 8 MB of state twice over a link."""
    workload = Workload(uniform(1_000_000, 50), 32, 0.2)
    found = control_plane(workload, FLAT, 1025, step_seconds=0.2, samples=1025 * 32 * 10)
    assert found.replica_check == pytest.approx(1024 * (1e-5 + 800 / 1e9))
    assert found.replica_check_share == pytest.approx(found.replica_check / 2.0)  # of ten steps
    assert found.broadcast == pytest.approx((math.log2(1025) + 1024) * 1e-5 + 2 * 1024 / 1025 * 8e6 / 1e9)
    assert found.costliest == "beats" and found.share == found.beats + found.replica_check_share
    alone = control_plane(workload, FLAT, 1, step_seconds=0.2, samples=1)
    assert (alone.num_connections, alone.share, alone.stop) == (0, 0, 0)


def test_accuracy_helpers():
    # Kaplan et al. 2020: 8.8e13 parameters would reach 1 nat; a hundredth of them 100^0.076 = 1.419.
    assert loss_by_parameters(8.8e13) == 1 and loss_by_parameters(8.8e11) == pytest.approx(1.419, abs=1e-3)
    assert epochs_needed(90, 8192) == 90 and epochs_needed(90, 20_000, 20_000) == 180


def test_networks_are_torchvisions():
    """Oracle: torchvision's modules, whose parameters are counted tensor by tensor."""
    torch = pytest.importorskip("torch")
    models = pytest.importorskip("torchvision.models")
    for name in ("resnet50", "vgg16"):
        with torch.device("meta"):
            theirs = [parameter.numel() for parameter in getattr(models, name)().parameters()]
        layers = iter(known_networks()[name].layers)
        assert sum(theirs) == known_networks()[name].num_parameters
        while theirs:
            layer = next(layers)
            of_layer, theirs = theirs[: layer.num_tensors], theirs[layer.num_tensors :]
            assert name == "resnet50" or sum(of_layer) == layer.num_parameters, layer


def test_the_command(tmp_path, capsys):
    output = tmp_path / "out" / "forecast.json"
    flags = ["--network", "resnet50", "--step-ms", "200", "--ranks", "1,64,100000", "--samples", "1000000"]
    command.main([*flags, "--output", str(output)])
    content = json.loads(output.read_text())
    assert [row["num_ranks"] for row in content["forecasts"]] == [1, 64, 100000]
    assert content["forecasts"][0]["efficiency"] == 1
    printed = capsys.readouterr().out
    assert printed.count("%") >= 3 and "to accuracy" in printed
    assert [row["bottleneck"] for row in content["forecasts"]][1:] == ["stragglers", "control plane (replica check)"]
    assert content["forecasts"][2]["control_plane"]["num_connections"] == 12_506
    assert re.search(r"\n +100000 +57\.9% .* 12,506\n", printed)
    command.main(["--validate"])
    assert "NO" not in capsys.readouterr().out
    command.main(["--loss-of-parameters", "8.8e13"])
    assert "1.0000" in capsys.readouterr().out


def test_the_former_name_is_told_and_does_the_same(capsys):
    cli.call(["forecast", "--loss-of-parameters", "8.8e13"])
    expected = capsys.readouterr()
    cli.call(["predict", "--loss-of-parameters", "8.8e13"])
    found = capsys.readouterr()
    assert found.out == expected.out and not expected.err
    assert found.err == "allstep predict is now allstep forecast; the old name goes in the next release\n"


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
    [missed] = [row for row in json.loads(output.read_text())["rows"] if not row["within"]]
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

    assert run_with_rates(100.0, 640.0) == measured_runs.MeasuredRun(pytest.approx(0.1), 64, 1_199_882, None)
    # Epochs of 0.9, 1 and 1.1 times 0.1 s a step: a standard deviation of a tenth of the mean.
    assert run_with_rates(1.0, 640 / 0.9, 640.0, 640 / 1.1).jitter == pytest.approx(0.1)
    for flags, jitter in (([], "10.0%"), (["--jitter", "0.03"], "3.0%"), (["--jitter", "0"], "0.0%")):
        command.main(["--run", str(tmp_path), *flags])
        assert f"jitter {jitter}" in capsys.readouterr().out
    run_with_rates(100.0, 640.0)
    command.main(["--run", str(tmp_path)])
    assert f"jitter {command.JITTER:.1%}" in capsys.readouterr().out
    epochs = [{**EPOCHS[0], "images_per_second": 640.0, "gradient_noise_scale": scale} for scale in (70.0, 128.0)]
    run.write_text("".join(json.dumps(event) + "\n" for event in [start, *epochs, EPOCHS[0]]))
    printed = []
    for flags in ((), ("--critical-batch", "128")):  # the last measured value is used
        command.main(["--run", str(tmp_path), "--samples", "60000", *flags])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "critical batch 128 samples" in printed[0]
    run.write_text(json.dumps({**start, "world_size": 2}) + "\n")
    with pytest.raises(UserError, match="one rank"):
        measured_runs.read_run(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [("", "readable"), ('{"format": "allstep-compare", "version": 1}', "received allstep-compare 1"), ("[1]", "list")],
)
def test_results_of_another_version_or_half_written(tmp_path, content, expected):
    (tmp_path / "compare.json").write_text(content)
    with pytest.raises(UserError, match=expected):
        files.read_input(ComparisonResult, tmp_path / "compare.json")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "--step-ms"),
        (["--step-ms", "-1"], "above 0"),
        (["--step-ms", "nan"], "a number"),
        (["--step-ms", "inf"], "at most"),
        (["--step-ms", "1", "--backward-share", "2"], "at most 1"),
        (["--step-ms", "1", "--network", "nosuch"], "resnet50"),
        (["--step-ms", "1", "--ranks", "0"], "at least 1"),
        (["--run", "/nosuch"], "metrics.jsonl"),
        (["--step-ms", "1", "--collectives", "/nosuch"], "readable"),
        (["--validate", "--measured", "."], "--collectives"),
    ],
)
def test_mistakes(flags, expected):
    with pytest.raises(UserError, match=expected) as caught:
        command.main(flags)
    assert "\n" not in str(caught.value)


def test_a_file_of_layers(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("- [fc1, 1000]\n- [fc2, 10, 5.0, 1]\n")
    assert read_network(path).num_parameters == 1010
    for wrong in ("- 3", "[]", "- [fc1, -1]", "{"):
        path.write_text(wrong)
        with pytest.raises(UserError, match="YAML list"):
            read_network(path)
