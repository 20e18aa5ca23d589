"""Description of a run in its checkpoints, compared by `--resume`. Oracle: the data, and what the case changes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from numpy_ranks import Job
from PIL import Image

from allstep.common.base.errors import UserError
from allstep.common.checkpoint import load, load_manifest
from allstep.common.config.train_config import DataConfig, TrainConfig
from allstep.common.data import datasets
from allstep.common.files.strict_json import Mismatch, to_json
from allstep.common.training.description import check_same, describe, read_description

FLAGS = ("--dataset", "image-folder", "--image-size", 8, "--decode-threads", 1, "--global-batch-size", 4)


def images(folder: Path, *classes: str) -> Path:
    for part in ("train", "val"):
        for number, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for index in range(4):
                pixels = np.full((8, 8, 3), 40 * number + index, np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{index}.png")
    return folder


def train(output: Path, data: Path, *flags: object) -> None:
    Job(1, *FLAGS, "--data-dir", data, "--output-dir", output, *flags).train()


def described(dataset: str, cache: Path):
    config = TrainConfig(data=DataConfig(dataset=dataset, data_dir=cache))
    datasets.prepare(config.data)
    content = describe(config, datasets.load(config.data), framework="pytorch", versions={})
    return read_description(json.loads(json.dumps(to_json(content))))


@pytest.fixture
def run(tmp_path):
    train(tmp_path / "run", images(tmp_path / "data", "cat", "dog"), "--epochs", 1)
    return tmp_path / "run"


def test_a_checkpoint_knows_its_classes_and_preprocessing(run):
    found = read_description(load_manifest("latest", run / "checkpoints").description)
    assert (found.classes, found.num_classes, found.task) == (("cat", "dog"), 2, "classification")
    assert (found.input_shape, found.input_type, found.scale) == ((8, 8, 3), "uint8", 255)
    assert found.mean == (0.485, 0.456, 0.406)
    assert dataclasses.astuple(found.image_files) == (8, 224 / 256, False, "RGB")
    assert (found.loss, found.model, found.framework) == ("cross-entropy", "cnn", "pytorch")
    assert found.versions == {"numpy": np.__version__} and found.allstep


def test_moved_data_goes_on_and_an_old_checkpoint_too(run, tmp_path):
    shutil.move(tmp_path / "data", tmp_path / "moved")
    train(run, tmp_path / "moved", "--epochs", 2, "--resume", "latest")
    state = load("latest", run / "checkpoints", warn=pytest.fail)
    assert state.progress.epoch == 2 and state.description["classes"] == ["cat", "dog"]
    assert read_description({}) is None


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (("cat", "wolf"), "expected class 1 to be dog, as the checkpoint has, received wolf; resume with"),
        (("cat", "dog", "emu"), r"expected the 2 classes of the checkpoint, received 3 \(with emu\); resume"),
        (("ant", "dog"), "expected class 0 to be cat, as the checkpoint has, received ant"),
    ],
)
def test_other_classes_are_refused_by_name(run, tmp_path, classes, expected):
    with pytest.raises(UserError, match=expected):
        train(run, images(tmp_path / "other", *classes), "--epochs", 2, "--resume", "latest")


def table(folder: Path, **columns: object) -> str:
    folder.mkdir()
    pyarrow.parquet.write_table(pa.table(columns), folder / "train.parquet")
    return f"parquet:{folder}"


def test_fields_names_and_vocabulary_of_files_are_described(tmp_path):
    numbers = list(np.arange(20) / 7)
    names = ["red", "green"] * 10
    before = described(table(tmp_path / "a", x=numbers, label=names), tmp_path)
    assert (before.fields, before.classes) == (("x", "label"), ("green", "red"))
    other = described(table(tmp_path / "b", input=numbers, label=names), tmp_path)
    with pytest.raises(UserError, match=r"expected the fields \(x, label\), as the checkpoint has, received \(input"):
        check_same(before, other, advice="stop")
    (tmp_path / "text").write_text("ä" + "abc def " * 200)
    text = described(f"text:{tmp_path}/text", tmp_path)
    assert text.vocabulary == " abcdefä" and text.num_tokens == 9 and text.task == "next-token"
    (tmp_path / "text").write_text("ö" + "abc def " * 200)
    with pytest.raises(UserError, match="expected a vocabulary with .'ä'., as the checkpoint has, received .'ö'.;"):
        check_same(text, described(f"text:{tmp_path}/text", tmp_path), advice="stop")


def test_a_forged_description_is_refused(run):
    good = load_manifest("latest", run / "checkpoints").description
    for change in ({"classes": ["a"]}, {"std": [0.0]}, {"task": "magic"}, {"input_shape": [-1]}, {"mean": "x"}):
        with pytest.raises(Mismatch):
            read_description({**good, **change})
