"""The command `allstep forecast`: tables, results and refused flags."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from allstep.commands import cli
from allstep.commands.forecast import command
from allstep.commands.forecast.command import epochs_needed, loss_by_parameters
from allstep.common.base.errors import UserError


def forecasts(tmp_path, *flags: str) -> list[dict]:
    """Return the rows that the command writes."""
    command.main([*flags, "--output", str(tmp_path / "forecast.json")])
    return json.loads((tmp_path / "forecast.json").read_text())["forecasts"]


def test_the_command(tmp_path, capsys):
    flags = ["--network", "resnet50", "--step-ms", "200", "--ranks", "1,64,100000", "--samples", "1000000"]
    rows = forecasts(tmp_path / "new", *flags)
    assert [row["num_ranks"] for row in rows] == [1, 64, 100000]
    assert [rows[0][name] for name in ("efficiency", "low", "high")] == [1, 1, 1]
    assert all(row["low"] < row["efficiency"] < row["high"] for row in rows[1:])
    assert [row["bottleneck"] for row in rows] == ["computing", "not measured", "control plane (replica check)"]
    assert rows[2]["control_plane"]["num_connections"] == 12_506
    printed = capsys.readouterr().out
    assert "10-90%" in printed and "to accuracy" in printed and "assumed" in printed and "ranges are wider" in printed
    assert re.search("{efficiency:.1%} +{low:.1%} to {high:.1%} ".format(**rows[1]), printed)
    assert re.search(r"\n +100,000 +57\.9% .* 12,506 *\n", printed)
    command.main(["--validate"])
    assert re.search(r"\d\d% in the range\n", capsys.readouterr().out)
    command.main(["--loss-of-parameters", "8.8e13"])
    assert "1.0000" in capsys.readouterr().out


def test_efficiency_has_the_control_plane_in_it(tmp_path):
    [found] = forecasts(tmp_path, "--step-ms", "200", "--ranks", "100000")
    [apart] = forecasts(tmp_path, "--step-ms", "200", "--ranks", "100000", "--no-control-plane")
    share = found["control_plane"]["beats"] + found["control_plane"]["replica_check_share"]
    assert share > 0.5 and apart["control_plane"] is None
    assert found["efficiency"] == pytest.approx(apart["efficiency"] / (1 + share))
    assert found["total"] == pytest.approx(0.2 / found["efficiency"])
    assert found["images_per_second"] == pytest.approx(100_000 * 32 / found["total"])
    assert found["low"] < apart["low"] and found["high"] == apart["high"]  # it may cost nothing on an idle core


@pytest.mark.parametrize(
    "flags",
    [
        ("--no-overlap",), ("--compression", "fp16"), ("--algorithm", "host-memory"), ("--algorithm", "tree"),
        ("--algorithm", "parameter-servers"), ("--algorithm", "parameter-servers", "--servers", "2"), ("--sharded",),
        ("--sharded", "--gather-bits", "32"), ("--accumulate-steps", "4"), ("--optimizer-ms", "30"), ("--buckets",),
        ("--buckets", "--fusion-mib", "500"), ("--cycle-ms", "50"), ("--request-us", "100"), ("--link", "tcp"),
        ("--network", "gpt2"), ("--network", "alexnet"), ("--parameters", "1e9"), ("--intra-us", "900"),
        ("--inter-us", "900"), ("--intra-gbit", "10"), ("--inter-gbit", "10"), ("--ranks-per-node", "4"),
        ("--jitter", "0"), ("--crowding", "2"), ("--contention", "1"), ("--backward-share", "0.1"),
        ("--baseline-ranks", "2"), ("--node-input", "10"), ("--storage-input", "10"),
        ("--batch-size", "64", "--storage-input", "1000"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_flag_has_an_effect(tmp_path, flags):
    """A flag that changes nothing would be ignored silently."""
    flags = flags if {"--network", "--parameters"} & set(flags) else ("--network", "vgg16", *flags)
    slow = () if {"--intra-us", "--intra-gbit"} & set(flags) else ("--inter-gbit", "25", "--link", "rdma")
    slow = slow if not {"--inter-gbit", "--link"} & set(flags) else ()
    ranks = ("--ranks", "8" if not slow and "--intra-gbit" in flags else "64", "--step-ms", "200")
    [usual] = forecasts(tmp_path, "--network", "vgg16", *slow, *ranks)
    [found] = forecasts(tmp_path, *flags, *slow, *ranks)
    assert abs(found["efficiency"] - usual["efficiency"]) > 1e-5


def test_what_is_given_is_named(tmp_path):
    for flags, name in (
        (("--jitter", "0.3"), "stragglers"),
        (("--inter-gbit", "5"), "bandwidth"),
        (("--inter-us", "9000"), "latency"),
        (("--crowding", "2"), "crowded nodes"),
        (("--node-input", "100"), "input"),
        (("--inter-us", "9000", "--inter-gbit", "1e6", "--contention", "0"), "latency"),
    ):
        [row] = forecasts(tmp_path, "--step-ms", "200", "--ranks", "64", *flags)
        assert row["bottleneck"] == name, flags
    for row in forecasts(tmp_path, "--step-ms", "200", "--ranks", "2,8,16,64,512,4096"):
        assert row["bottleneck"] in ("not measured", "computing") and (row["helps"] or ("twice",))[0].startswith(
            "twice"
        )


def test_ranges_widen_with_what_no_publication_measured(tmp_path):
    def relative_width(*flags: str) -> float:
        [row] = forecasts(tmp_path, "--step-ms", "400", "--ranks", "16", "--no-control-plane", *flags)
        return (1 / row["low"] - 1 / row["high"]) / (1 / row["efficiency"] - 0.97)

    usual = relative_width()
    assert relative_width("--accumulate-steps", "2") > usual and relative_width("--inter-gbit", "100000") > usual


def test_a_network_of_the_users_in_the_command(tmp_path, capsys):
    pytest.importorskip("torch")
    program = Path(__file__).parent / "programs" / "user_networks.py"
    [row] = forecasts(tmp_path, "--model", f"{program}:convolutions", "--input-shape", "9,9,3", "--classes", "10",
                      "--step-ms", "2", "--ranks", "16")  # fmt: skip
    assert "1,530 parameters" in capsys.readouterr().out and row["efficiency"] < 1


def test_the_former_name_is_told_and_does_the_same(capsys):
    cli.call(["forecast", "--loss-of-parameters", "8.8e13"])
    expected = capsys.readouterr()
    cli.call(["predict", "--loss-of-parameters", "8.8e13"])
    found = capsys.readouterr()
    assert found.out == expected.out and not expected.err
    assert found.err == "allstep predict is now allstep forecast; the old name goes in the next release\n"


def test_accuracy_helpers():
    # Kaplan et al. 2020: 8.8e13 parameters would reach 1 nat; a hundredth of them 100^0.076 = 1.419.
    assert loss_by_parameters(8.8e13) == 1 and loss_by_parameters(8.8e11) == pytest.approx(1.419, abs=1e-3)
    assert epochs_needed(90, 8192) == 90 and epochs_needed(90, 20_000, 20_000) == 180


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
        (["--validate", "--collectives", "x.json"], "--measured with --validate and --collectives"),
        (["--step-ms", "1", "--network", "vgg16", "--parameters", "1e9"], "--network or --parameters, received both"),
        (["--step-ms", "1", "--network", "vgg16", "--model", "a.py:b"], "--network or --model"),
        (["--step-ms", "1", "--parameters", "9", "--model", "a.py:b"], "--parameters or --model"),
        (["--step-ms", "1", "--measured", "."], "--validate with --measured"),
        (["--step-ms", "1", "--epochs", "3"], "--samples with --epochs"),
        (["--step-ms", "1", "--critical-batch", "3"], "--samples with --critical-batch"),
        (["--step-ms", "1", "--buckets", "--cycle-ms", "1"], "--buckets or --cycle-ms"),
        (["--step-ms", "1", "--buckets", "--request-us", "1"], "--buckets or --request-us"),
        (["--validate", "--loss-of-parameters", "1e9"], "no --validate with --loss-of-parameters"),
        (["--validate", "--network", "vgg16"], "no --network with --validate"),
        (["--validate", "--ranks", "2"], "no --ranks with --validate"),
        (["--loss-of-parameters", "1e9", "--output", "x.json"], "no --output with --loss-of-parameters"),
        (["--run", "x", "--step-ms", "1"], "--run or --step-ms"),
        (["--run", "x", "--batch-size", "32"], "--run or --batch-size"),
        (["--run", "x", "--baseline-ranks", "1"], "--run or --baseline-ranks"),
        (["--step-ms", "1", "--sharded", "--algorithm", "ring"], "--sharded or --algorithm"),
        (["--step-ms", "1", "--gather-bits", "16"], "--sharded with --gather-bits"),
        (["--step-ms", "1", "--servers", "2"], "--algorithm with --servers"),
        (["--step-ms", "1", "--servers", "2", "--algorithm", "ring"], "--algorithm parameter-servers with --servers"),
        (["--step-ms", "1", "--algorithm", "host-memory", "--contention", "1"], "no --contention with --algorithm"),
        (["--step-ms", "1", "--no-overlap", "--contention", "1"], "--no-overlap or --contention"),
        (["--step-ms", "1", "--input-shape", "3"], "--model with --input-shape"),
        (["--step-ms", "1", "--model", "a.py:b", "--input-shape", "3,3"], "received 2 sizes"),
        (["--step-ms", "1", "--optimizer-ms", "1"], "--optimizer-ms below the 1 ms of a step"),
        (["--step-ms", "1", "--parameters", "1.5"], "a whole number"),
    ],
)
def test_mistakes(flags, expected):
    with pytest.raises(UserError, match=expected) as caught:
        command.main(flags)
    assert "\n" not in str(caught.value)
