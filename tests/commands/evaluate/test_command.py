"""Evaluation of trained runs. Oracles: scikit-learn, the run's own validation, and exact lines."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from ranks import REPOSITORY, last, launch, train
from sklearn.metrics import f1_score

from allstep.commands.evaluate import command
from allstep.commands.evaluate.samples import fitted, words_for
from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets import Dataset
from allstep.common.training.description import Description
from allstep.common.training.metrics import Evaluation

FLAGS = ("--image-size", 16, "--decode-threads", 1, "--batch-size", 4, "--model", "cnn")


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(shade).integers(0, 40, (20, 24, 3))
    Image.fromarray((noise + shade).astype(np.uint8)).save(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for part, count in (("train", 10), ("val", 5), ("test", 7)):
        for number, name in enumerate(("cat", "dog", "emu")):
            for index in range(count):
                picture(folder / part / name / f"{index}.png", 70 * number + index)
    return folder


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "run"
    flags = ("--dataset", "image-folder", "--data-dir", data, *FLAGS, "--epochs", 3, "--ema", 0.5, "--metrics", "f1")
    train("pytorch", "alone", 1, output, *map(str, flags))
    return output


def rows(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return list(csv.DictReader(path.open())) if path.suffix == ".csv" else pyarrow.parquet.read_table(path).to_pylist()


def test_on_ranks_in_both_frameworks_each_sample_once(trained, tmp_path):
    """The run's own validation gives the numbers; all give the same rows, in the order of the data set."""
    epoch = last([json.loads(line) for line in (trained / "metrics.jsonl").open()], "epoch")
    found = []
    for launcher, ranks, framework in (("horovodrun-mpi", 2, "pytorch"), ("horovodrun-mpi", 3, "tensorflow")):
        out, table = tmp_path / f"{ranks}.json", tmp_path / f"{ranks}.csv"
        flags = ("--metrics", "f1", "--framework", framework, "--output", out, "--predictions", table)
        result = launch(launcher, ranks, "-m", "allstep.commands.cli", "evaluate", trained, *flags)
        assert result.returncode == 0, result.output
        values = json.loads(out.read_text())
        assert values["samples"] == 15 and values["accuracy"] == epoch["validation_accuracy"]
        assert values["loss"] == pytest.approx(epoch["validation_loss"], rel=1e-4)
        assert values["f1"] == pytest.approx(epoch["validation_f1"])
        found.append(rows(table))
    one, other = found
    assert [row["path"].rsplit("/", 2)[1] for row in one] == [row["target"] for row in one]
    assert len({row["path"] for row in one}) == 15
    for left, right in zip(one, other, strict=True):
        assert [left[name] for name in ("path", "target", "predicted")] == [
            right["path"],
            right["target"],
            right["predicted"],
        ]
        assert float(left["probability_1"]) == pytest.approx(float(right["probability_1"]), rel=1e-3)


def test_another_part_with_averaged_weights_and_each_kind_of_file(trained, data, tmp_path):
    files = [tmp_path / f"p.{suffix}" for suffix in ("csv", "parquet", "jsonl")]
    for path in files:
        command.main([str(trained), "--split", "test", "--ema", "--predictions", str(path), "--top", "2"])
    first, second, third = map(rows, files)
    assert second == third and len(first) == 21
    assert list(first[0]) == ["path", "target", "predicted", "class_1", "probability_1", "class_2", "probability_2"]
    assert [{**row, **{name: float(row[name]) for name in row if "probability" in name}} for row in first] == second


def test_pictures_without_classes(trained, data, tmp_path):
    """The rows are those of the same pictures with classes."""
    flat = tmp_path / "pictures"
    for name in ("cat", "emu"):
        shutil.copytree(data / "val" / name, flat / name)
    command.main([str(trained), "--images", str(flat), "--predictions", str(tmp_path / "p.jsonl")])
    command.main([str(trained), "--predictions", str(tmp_path / "all.jsonl")])
    expected = {Path(row["path"]).parts[-2:]: row for row in rows(tmp_path / "all.jsonl")}
    found = rows(tmp_path / "p.jsonl")
    assert [Path(row["path"]).parts[-2:] for row in found] == [
        (c, f"{i}.png") for c in ("cat", "emu") for i in range(5)
    ]
    for row in found:
        same = expected[Path(row.pop("path")).parts[-2:]]
        assert row["predicted"] == same["predicted"]
        assert row["probability_1"] == pytest.approx(same["probability_1"], rel=1e-5)
    picture(flat / "bad.png", 0)
    (flat / "bad.png").write_bytes(b"no picture")
    before = (tmp_path / "p.jsonl").read_bytes()
    with pytest.raises(Exception, match="expected an image in .*bad.png"):
        command.main([str(trained), "--images", str(flat), "--predictions", str(tmp_path / "p.jsonl")])
    assert (tmp_path / "p.jsonl").read_bytes() == before


def test_metrics_are_those_of_scikit_learn(trained, tmp_path):
    command.main(
        [
            str(trained),
            "--metrics",
            "f1-per-class",
            "--output",
            str(tmp_path / "a.json"),
            "--predictions",
            str(tmp_path / "p.jsonl"),
        ]
    )
    table = rows(tmp_path / "p.jsonl")
    expected = f1_score([row["target"] for row in table], [row["predicted"] for row in table], average=None)
    assert json.loads((tmp_path / "a.json").read_text())["f1_per_class"] == pytest.approx(expected.tolist())


def test_a_metric_that_is_not_finite_is_told():
    dataset = cast("Dataset", SimpleNamespace(class_names=()))
    [line] = command._lines(Evaluation(0.5, {"of_zero": None}, 3), dataset)
    assert line == "Samples = 3, Loss = 0.5, Of zero = not finite"


def renamed(trained: Path, data: Path, folder: Path) -> Path:
    shutil.copytree(data / "val", folder / "train")
    shutil.copytree(data / "val", folder / "val")
    for part in ("train", "val"):
        os.rename(folder / part / "emu", folder / part / "fox")
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--data-dir", "{other}"), "expected class 2 to be emu, as the checkpoint has, received fox; evaluate on"),
        (("--metrics", "rmse"), "--metrics rmse does not fit the targets of image-folder"),
        (("--dataset", "digits"), "expected samples of shape|expected a number of classes"),
        (("--checkpoint", "step-00000009"), "step-00000009"),
        (
            ("--predictions", "p.txt"),
            "expected --predictions to be a file that ends in .csv, .parquet, .jsonl, received p.txt",
        ),
        (("--output", "p.csv", "--predictions", "./p.csv"), "--output and --predictions name one file, p.csv"),
        (("--images", "{other}"), "--images needs --predictions FILE"),
        (("--resume", "latest"), "--resume is for training, not for allstep evaluate"),
        (("--split", "test", "--dataset", "digits"), "--split test: --dataset digits has no test part"),
        (("--split", "exam"), "expected --split to be one of|--split"),
        (("--batch-sise", "4"), "did you mean --batch-size"),
    ],
)
def test_mistakes_are_one_line(trained, data, words, expected, tmp_path):
    other = renamed(trained, data, tmp_path / "other")
    with pytest.raises(UserError, match=expected):
        command.main([str(trained), *(word.format(other=other) for word in words)])


def test_runs_that_are_none(tmp_path, trained):
    with pytest.raises(UserError, match="expected a run, a checkpoint or a .safetensors file at .*nothing"):
        command.main([str(tmp_path / "nothing")])
    cut = shutil.copytree(trained, tmp_path / "cut")
    earlier, newest = sorted((cut / "checkpoints").glob("*/model.safetensors"))[-2:]
    os.truncate(newest, 100)
    command.main([str(cut), "--output", str(tmp_path / "out.json")])
    assert earlier.parent.name.endswith(f"-{json.loads((tmp_path / 'out.json').read_text())['step']:08}")
    for path in (cut / "checkpoints").glob("*/model.safetensors"):
        os.truncate(path, 100)
    with pytest.raises(UserError, match="expected an undamaged checkpoint in .*only damaged ones"):
        command.main([str(cut)])


def test_code_of_a_run_is_named_again(tmp_path):
    """A run directory is data."""
    file = REPOSITORY / "examples" / "my_model.py"
    train("pytorch", "alone", 1, tmp_path / "run", "--model", f"{file}:build", "--epochs", "1")
    with pytest.raises(
        UserError, match="the --model of the run is code, which runs only if you name it too: add --model"
    ):
        command.main([str(tmp_path / "run")])
    command.main([str(tmp_path / "run"), "--model", f"{file}:build"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            ("age", "height", "label"),
            r"expected the fields \(height, age, label\), as the checkpoint has, received \(age",
        ),
        (("height", "weight", "label"), "expected the fields"),
        (("height", "age", "kind"), None),
        (("x", "y"), None),
    ],
)
def test_columns_stand_in_the_order_of_the_run(fields, expected):
    run = Description("classification", (), 2, (2,), "float32", ("height", "age", "label"))
    dataset = dataclasses.replace(run.dataset(), fields=fields)
    with pytest.raises(UserError, match=expected) if expected else contextlib.nullcontext():
        assert fitted(dataset, DataConfig(), run, part="validation").num_classes == 2


@pytest.mark.parametrize(("task", "targets"), [("classification", 3), ("next-token", 8)])
def test_the_highest_tokens_and_classes_need_not_occur(task, targets):
    run = Description(task, (), targets, (6,), "int64", num_tokens=8)
    fewer = dataclasses.replace(run, num_classes=targets - 1, num_tokens=7).dataset()
    found = fitted(fewer, DataConfig(), run, part="validation")
    assert (found.num_classes, found.num_tokens) == (targets, 8)
    with pytest.raises(UserError, match="received 9"):
        fitted(dataclasses.replace(fewer, num_tokens=9), DataConfig(), run, part="validation")


def test_another_type_is_named():
    run = Description("classification", (), 2, (2,), "float32")
    other = dataclasses.replace(run, input_type="int64").dataset()
    with pytest.raises(UserError, match="expected samples of type float32, as the checkpoint has, received int64; "):
        fitted(other, DataConfig(), run, part="validation")


def test_weights_of_a_file(trained, data, tmp_path):
    [*_, newest] = sorted((trained / "checkpoints").iterdir())
    results = []
    for source, flags in (
        (trained, ()),
        (newest / "model.safetensors", ("--dataset", "image-folder", "--data-dir", data, *FLAGS)),
    ):
        command.main([str(source), *map(str, flags), "--output", str(output := tmp_path / "new" / "out.json")])
        results.append(json.loads(output.read_text())["loss"])
    assert results[0] == pytest.approx(results[1], rel=1e-6)


@pytest.mark.parametrize(("dataset", "is_kept"), [("digits", False), ("parquet:x", True), (None, True)])
def test_flags_of_pictures_go_to_data_sets_that_use_them(dataset, is_kept):
    config = {"dataset": "image-folder", "image-size": 64, "validation-share": 0.2}
    words = words_for(SimpleNamespace(config=config), ["--dataset", dataset] if dataset else [])
    assert ("--image-size" in words) == ("--validation-share" in words) == is_kept
