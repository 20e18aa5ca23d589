"""`allstep forecast` started as a user starts it: its kinds, its files, and refused flags. Oracle: exact statuses."""

from __future__ import annotations

import json

from ranks import BIN, run, train

ALLSTEP = BIN / "allstep"


def forecast(*flags: object):
    return run(ALLSTEP, "forecast", *map(str, flags))


def test_each_kind_of_forecast(tmp_path):
    output = tmp_path / "new" / "forecast.json"
    result = forecast("--network", "resnet50", "--step-ms", "200", "--ranks", "1,16", "--output", output)
    assert result.returncode == 0 and not result.stderr, result.output
    assert [row["num_ranks"] for row in json.loads(output.read_text())["forecasts"]] == [1, 16]
    assert "10-90%" in result.stdout
    result = forecast("--validate", "--output", tmp_path / "errors.json")
    assert result.returncode == 0 and len(json.loads((tmp_path / "errors.json").read_text())["rows"]) == 87
    result = forecast("--loss-of-parameters", "8.8e13")
    assert result.returncode == 0 and result.stdout.startswith("loss 1.0000 nats")
    result = run("bash", "-c", f"{ALLSTEP} forecast --step-ms 200 | head -3; exit ${{PIPESTATUS[0]}}")
    assert result.returncode in (0, 141) and not result.stderr and len(result.stdout.splitlines()) == 3


def test_runs_of_one_and_two_ranks(tmp_path):
    runs, flags = [], ("--model", "mlp", "--epochs", "2", "--global-batch-size", "64")
    for num_ranks, launcher in ((1, "alone"), (2, "horovodrun-gloo")):
        runs.append(tmp_path / f"{num_ranks}")
        train("pytorch", launcher, num_ranks, runs[-1], *flags)
    output = tmp_path / "forecast.json"
    result = forecast("--run", runs[0], "--run", runs[1], "--ranks", "2,4", "--output", output)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.output
    assert "received samples a rank 64 on 1 and 32 on 2 ranks" in result.stderr
    train("pytorch", "horovodrun-gloo", 2, tmp_path / "same", *flags[:-2], "--batch-size", "64")
    result = forecast("--run", runs[0], "--run", tmp_path / "same", "--ranks", "2,4", "--output", output)
    assert result.returncode == 0 and not result.stderr, result.output
    assert "calibrated on runs of up to 2 ranks" in result.stdout
    assert [row["num_ranks"] for row in json.loads(output.read_text())["forecasts"]] == [2, 4]


def test_refused_flags_leave_files_alone(tmp_path):
    output = tmp_path / "forecast.json"
    output.write_text("before")
    for flags, expected in (
        (("--step-ms", "1", "--network", "vgg16", "--parameters", "1e9"), "expected --network or --parameters"),
        (("--step-ms", "1", "--epochs", "3"), "expected --samples with --epochs"),
        (("--run", tmp_path), "metrics.jsonl"),
        (("--step-ms", "1", "--output", tmp_path), "--output"),
    ):
        result = forecast("--output", output, *flags)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, (flags, result.output)
        assert expected in result.stderr and not result.stdout and output.read_text() == "before"
