"""Data of a resumed run. Oracle: the samples, which are the same, or differ in what the case names."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import DataConfig, Dataset, load, prepare
from allstep.common.data.formats import tfrecord
from allstep.common.data.formats.python_file import as_dataset
from allstep.common.training import same_on_ranks
from allstep.common.training.same_on_ranks import check_data, digests_of

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(100, 3)).astype(np.float32)
Y = np.sort(np.arange(100) % 4)
SWAPPED = X[[0, 1, 5, 3, 4, 2, *range(6, 100)]]  # two samples of a class that are not among the few looked at
WITHIN_CLASS = np.concatenate([RANDOM.permutation(25) + 25 * number for number in range(4)])


def npz(folder: Path, x: np.ndarray = X, y: np.ndarray = Y, v: np.ndarray = X[:9]) -> Dataset:
    folder.mkdir(exist_ok=True)
    np.savez(folder / "samples.npz", x_train=x, y_train=y, x_val=v, y_val=Y[:9])
    return opened(f"npz:{folder}/samples.npz", folder)


def parquet(folder: Path, x: np.ndarray = X, y: np.ndarray = Y, names: str = "abcd") -> Dataset:
    folder.mkdir(exist_ok=True)
    features = str({"info": {"features": {"y": {"names": list(names), "_type": "ClassLabel"}}}}).replace("'", '"')
    for part in ("train", "val"):
        table = pa.table({"x": list(x), "y": y}).replace_schema_metadata({"huggingface": features})
        pyarrow.parquet.write_table(table, folder / f"{part}.parquet")
    return opened(f"parquet:{folder}", folder)


def image(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(stream, "bmp")
    return stream.getvalue()


def images(folder: Path, names: str = "abcd", shift: int = 0, changed: int | None = None) -> Dataset:
    for part in ("train", "val"):
        for number, name in enumerate(names):
            (folder / part / name).mkdir(parents=True)
            for index in range(30):
                pixel = 200 if (number, changed) == (0, index) else 40 * number + (index + shift) % 3
                (folder / part / name / f"{index:02}.bmp").write_bytes(image(pixel))
    return opened("image-folder", folder, data_dir=folder, image_size=8)


def records(folder: Path, changed: int | None = None) -> Dataset:
    folder.mkdir()
    message = tfrecord.example_class()()
    for part in ("train", "val"):
        with open(folder / f"{part}.tfrecord", "wb") as stream:
            for index in range(100):
                message.Clear()
                for name, value in ((b"x", image(200 if changed == index else index)), (b"y", b"ab"[index % 2 :][:1])):
                    message.features.feature.add(key=name).value.bytes_list.value.append(value)
                data = message.SerializeToString()
                header = struct.pack("<Q", len(data))
                crcs = (struct.pack("<I", tfrecord._masked_crc(one)) for one in (header, data))
                stream.write(header + next(crcs) + data + next(crcs))
    return opened(f"tfrecord:{folder}", folder, image_size=8)


def opened(dataset: str, folder: Path, **flags: object) -> Dataset:
    config = DataConfig(**{"dataset": dataset, "data_dir": folder / "cache", "decode_threads": 1, **flags})
    prepare(config)
    return load(config)


@pytest.mark.parametrize("make", [npz, parquet, images, records])
def test_moved_data_is_the_same(make, tmp_path):
    before = digests_of(make(tmp_path / "one"))
    shutil.rmtree(tmp_path / "one")
    check_data(before, digests_of(make(tmp_path / "two")))


@pytest.mark.parametrize(
    ("make", "changed", "what"),
    [
        (npz, {"y": Y[::-1].copy()}, "training labels"),
        (npz, {"x": X[WITHIN_CLASS]}, "training inputs"),
        (npz, {"v": X[9:18]}, "validation inputs"),
        (npz, {"x": SWAPPED}, "training samples"),
        (parquet, {"y": Y[::-1].copy()}, "training labels"),
        (parquet, {"x": X[WITHIN_CLASS]}, "training inputs"),
        (parquet, {"x": SWAPPED}, "training samples"),
        (parquet, {"names": "abce"}, "class names"),
        (images, {"names": "abce"}, "class names"),
        (images, {"shift": 1}, "training inputs"),
        *((make, {"changed": 2}, "training samples") for make in (images, records)),  # none of the few looked at
    ],
)
def test_other_data_of_the_same_size_is_named(make, changed, what, tmp_path):
    before, after = (digests_of(make(tmp_path / name, **flags)) for name, flags in (("a", {}), ("b", changed)))
    with pytest.raises(UserError, match=f"the {what} of the data set are not those") as error:
        check_data(before, after)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("make", "finds"), [(images, False), (records, True)])
def test_of_large_files_sizes_and_checksums_are_compared(make, finds, tmp_path, monkeypatch):
    monkeypatch.setattr(same_on_ranks, "_MAX_FILE_BYTES", 1000)
    before = digests_of(make(tmp_path / "one"))
    assert (before != digests_of(make(tmp_path / "two", changed=2))) is finds
    if make is images:
        (tmp_path / "two/train/a/03.bmp").write_bytes(image(200) + b"0")
        assert before != digests_of(opened("image-folder", tmp_path, data_dir=tmp_path / "two", image_size=8))


def test_parts_that_are_held_out_have_their_own_labels():
    def digests(seed: int, y: np.ndarray) -> dict[str, str]:
        return digests_of(as_dataset((X, y), None, DataConfig(seed=seed), where="x"))

    assert digests(0, Y) == digests(0, Y) != digests(1, Y)
    swapped = Y.copy()
    swapped[[3, 97]] = Y[[97, 3]]
    with pytest.raises(UserError, match="labels of the data set"):
        check_data(digests(0, Y), digests(0, swapped))


def test_a_checkpoint_of_an_older_version_has_none():
    dataset = as_dataset((X, Y), None, DataConfig(), where="x")
    check_data({}, digests_of(dataclasses.replace(dataset, class_names=("a",))))


def map_style(*, pixel: int, draws: bool = False) -> Dataset:
    class Samples:
        classes = ("a", "b")
        targets = tuple(number % 2 for number in range(40))

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return np.full(4, pixel + index + (os.urandom(1)[0] if draws else 0), np.float32), self.targets[index]

    return as_dataset(Samples(), Samples(), DataConfig(), where="x")


def test_samples_of_a_program_that_are_others_are_told(capsys):
    """Not refused: another version of the user's libraries may decode them with other rounding."""
    before = digests_of(map_style(pixel=1))
    check_data(before, digests_of(map_style(pixel=1)))
    assert "those" not in capsys.readouterr().err
    check_data(before, digests_of(map_style(pixel=2)))
    assert "the training inputs as the program reads them are not those" in capsys.readouterr().err
    assert digests_of(map_style(pixel=1, draws=True)).keys() == {"class names", "training labels", "validation labels"}
