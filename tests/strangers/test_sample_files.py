"""Tables and archives as other people have them: all files are read, or a line says what is not.

Oracles: the values that were written, by NumPy, pyarrow, tarfile and TensorBoard's RecordWriter, or the exact line.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from other_data import RANDOM, opened, picture
from tensorboard.summary.writer.record_writer import RecordWriter

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import Dataset
from allstep.common.data.formats.tfrecord import example_class

NUMBERS = RANDOM.normal(size=(60, 3)).astype(np.float32)
LABELS = np.arange(60) % 4


def rows_of(dataset: Dataset) -> list[int]:
    """Return the numbers of the rows of NUMBERS in both parts, after comparing their labels."""
    found = []
    for split in (dataset.train, dataset.validation):
        inputs, labels = split.read(np.arange(len(split)), epoch=0)
        numbers = [int(np.flatnonzero((row == NUMBERS).all(1))[0]) for row in inputs]
        np.testing.assert_array_equal(labels, LABELS[numbers])
        found += numbers
    return sorted(found)


def parquet(path: Path, part: slice) -> None:
    pyarrow.parquet.write_table(pa.table({"x": NUMBERS[part].tolist(), "y": LABELS[part]}), path)


def arrow(path: Path, part: slice) -> None:
    table = pa.table({"x": NUMBERS[part].tolist(), "y": LABELS[part]})
    with path.open("wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def archive(path: Path, part: slice) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(60)[part]:
            label = f"{chr(0xFEFF) * (number % 2)} {LABELS[number]}\n"  # every other one with a byte order mark
            add(tar, f"./{number:04}", **{"x.npy": npy(NUMBERS[number]), "CLS": label.encode()})


def add(tar: tarfile.TarFile, key: str, **files: bytes) -> None:
    for ending, data in files.items():
        member = tarfile.TarInfo(f"{key}.{ending}")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


FORMATS: dict[str, tuple[str, Callable[[Path, slice], None], dict]] = {
    "parquet": (".parquet", parquet, {}),
    "hf": (".arrow", arrow, {}),
    "webdataset": (".tar", archive, {"input_fields": ("x.npy",)}),
}
A, B, C = slice(0, 30), slice(30, 50), slice(50, 60)
OTHER_PARTS = "files of other parts than train and val"
LAYOUTS = {
    "shards without a part": ({"0": A, "part-1": B, "deep/er/2": C}, 60, ""),
    "shards of parts": ({"train-0": A, "train-1": B, "test-0": C}, 60, ""),
    "folders of parts": ({"train/a": A, "train/more/b": B, "Validation/c": C}, 60, ""),
    "folders of an hf set": ({"train_sft/a": A, "train_sft/b": B, "test_sft/c": C}, 60, ""),
    "partitions of hive": ({"split=train/a": A, "split=train/b": B, "split=test/c": C}, 60, ""),
    "folders of other words": ({"test one/a": A, "test two/b": B, "c": C}, 60, ""),
    "folders in a folder": ({"data/train/a": A, "data/train/b": B, "data/dev/c": C}, 60, ""),
    "shards in a folder": ({"data/train-0-of-2": A, "data/train-1-of-2": B, "data/val-0-of-1": C}, 60, ""),
    "a shard with another name": ({"train-0": A, "part-1": B, "val-0": C}, 40, f"{OTHER_PARTS}: 1, such as part-1"),
    "a part too many": ({"train/a": A, "val/b": B, "test/c": C}, 50, f"{OTHER_PARTS}: 1, such as test/c"),
    "files beside folders": ({"train/a": A, "val/b": B, "c": C}, 50, f"{OTHER_PARTS}: 1, such as c"),
    "hidden files": ({"a": A, "b": B, "._c": C}, 50, "hidden files: 1, such as ._c"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", FORMATS)
def test_files_are_read_at_any_depth(kind, layout, tmp_path, capfd):
    ending, write, flags = FORMATS[kind]
    parts, count, line = LAYOUTS[layout]
    for number, (name, part) in enumerate(parts.items()):
        path = tmp_path / "a set" / f"{name}{(ending, ending.upper())[number == 1]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, part)
    dataset = opened(f"{kind}:{tmp_path}/a set", tmp_path / "cache", **flags)
    assert len(rows_of(dataset)) == count
    if layout in ("folders of an hf set", "partitions of hive"):
        assert (len(dataset.train), len(dataset.validation)) == (50, 10)
    err = capfd.readouterr().err
    assert line in err and err.count("\n") == bool(line)


def test_files_of_other_types_are_counted(tmp_path, capfd):
    parquet(tmp_path / "a.parquet", A)
    for name in ("b.csv", "c.parquet.tmp", "_SUCCESS"):
        (tmp_path / name).write_bytes(b"?")
    opened(f"parquet:{tmp_path}", tmp_path / "cache")
    expected = f"allstep: warning: parquet:{tmp_path}: passed over files that are not *.parquet: 2, such as b.csv\n"
    assert capfd.readouterr().err == expected
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(UserError, match=r"received none, and passed over .* \*.parquet: 2, such as b.csv"):
        opened(f"parquet:{tmp_path}", tmp_path / "cache")


PACKERS = {".tar.gz": gzip.compress, ".tgz": gzip.compress, ".TAR.BZ2": bz2.compress, ".tar.xz": lzma.compress}


def test_compressed_archives_beside_plain_ones(tmp_path, capfd):
    archive(tmp_path / "0.tar", slice(0, 20))
    for number, (ending, pack) in enumerate(PACKERS.items()):
        archive(tmp_path / "plain", slice(20 + 10 * number, 30 + 10 * number))
        (tmp_path / f"{number + 1}{ending}").write_bytes(pack((tmp_path / "plain").read_bytes()))
    (tmp_path / "plain").unlink()
    (tmp_path / "5.tar").write_bytes((tmp_path / "2.tgz").read_bytes())  # packed, whatever its name says
    dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",))
    assert set(rows_of(dataset)) == set(range(60)) and len(rows_of(dataset)) == 70 and capfd.readouterr().err == ""
    (tmp_path / "2.tgz").write_bytes((tmp_path / "2.tgz").read_bytes()[:-20])
    with pytest.raises(UserError, match="expected a whole file in .*2.tgz, received a damaged one .EOFError"):
        opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",))


def test_members_of_archives_that_are_no_samples_are_counted(tmp_path, capfd):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(12):
            add(tar, f"in here/{number}", cls=b"wolf" if number % 3 else "Łoś".encode(), webp=png("WEBP"))
            add(tar, f"in here/._{number}", webp=b"?")
        for kind, name in (
            (tarfile.SYMTYPE, "link.jpg"),
            (tarfile.LNKTYPE, "hard.jpg"),
            (tarfile.CHRTYPE, "device.jpg"),
            (tarfile.GNUTYPE_SPARSE, "holes.jpg"),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "in here/0.webp"
            tar.addfile(member)
        add(tar, ".git/a", jpg=b"?")
        tar.addfile(tarfile.TarInfo("README"))
    expected = (
        "passed over hidden files in archives: 13, such as in here/._0.webp; links, devices and sparse files in "
        "archives: 4, such as link.jpg; files without an ending in archives: 1, such as README\n"
    )
    for number in range(2):  # an index that is built, and one that is found
        flags = {"image_size": 8 + number}
        dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", validation_share=0.25, **flags)
        assert dataset.num_classes == 2 and len(dataset.train) == 9
        labels = np.concatenate(
            [split.read(np.arange(len(split)), epoch=0)[1] for split in (dataset.train, dataset.validation)]
        )
        assert np.bincount(labels).tolist() == [8, 4]  # "wolf" comes before "Łoś"
    assert expected in capfd.readouterr().err
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "0", cls=b"1", jpg=b"?")
        add(tar, "0", cls=b"2", JPG=b"?")
    with pytest.raises(UserError, match=r"several endings in .*a.tar, 0, received 4 with the endings cls, jpg"):
        opened(f"webdataset:{tmp_path}", tmp_path / "cache")


CUTS = {  # a sample has 2,048 bytes
    "a damaged header": lambda data: data[:4096] + b"\xff" * 512 + data[4608:],
    "zeros in between": lambda data: data[:4096] + bytes(1024) + data[4096:],
    "archives together": lambda data: data + data,
}


@pytest.mark.parametrize("kind", CUTS)
def test_what_follows_the_end_of_an_archive_is_not_left_out(kind, tmp_path):
    archive(tmp_path / "a.tar", A)
    (tmp_path / "a.tar").write_bytes(CUTS[kind]((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(
        UserError, match="whole tar archive in .*a.tar, received .*: [0-9]+ bytes after its end at [0-9]+"
    ):
        opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",))


def test_an_archive_that_is_cut_off_after_a_sample_is_told(tmp_path, capfd):
    archive(tmp_path / "a.tar", A)
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[: 7 * 2048])
    assert len(rows_of(opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",)))) == 7
    assert "over what may have followed in archives without an end: 1, such as a.tar" in capfd.readouterr().err


def png(kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    picture().save(stream, kind)
    return stream.getvalue()


NAMES = np.array(["ant", "bee", "cat 2", "Łoś"])
COLUMNS = {
    **{f"{kind}": pa.array(LABELS).cast(kind) for kind in (pa.int8(), pa.uint16(), pa.float16(), pa.float64())},
    "decimal": pa.array(LABELS).cast(pa.decimal128(20, 0)),
    "strings": pa.array(NAMES[LABELS].tolist()),
    "large strings": pa.array(NAMES[LABELS].tolist(), pa.large_string()),
    "string views": pa.array(NAMES[LABELS].tolist(), pa.string_view()),
    "categories of strings": pa.array(NAMES[LABELS].tolist()).dictionary_encode(),
    "categories of numbers": pa.array(LABELS).dictionary_encode(),
    "one-hot lists": pa.array(np.eye(4)[LABELS].tolist()),
    "one-hot lists of booleans": pa.array(np.eye(4, dtype=bool)[LABELS].tolist()),
    "lists of one": pa.array([[label] for label in LABELS.tolist()]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_labels(kind, tmp_path):
    for name, part in (("train-0", slice(40, 60)), ("train-1", slice(0, 40)), ("test-0", slice(5, 60))):
        column = COLUMNS[kind][part]
        if pa.types.is_dictionary(column.type):  # each file has a dictionary of its own
            column = pa.array(column.to_pylist()).dictionary_encode()
        pyarrow.parquet.write_table(
            pa.table({"x": NUMBERS[part].tolist(), "label": column}), tmp_path / f"{name}.parquet"
        )
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache")
    assert (dataset.task, dataset.num_classes) == ("classification", 4)
    assert len(rows_of(dataset)) == 115


ARRAYS_IN_ARCHIVES = {
    "one-hot rows of booleans": (np.eye(4, dtype=bool)[LABELS], NUMBERS),
    "one-hot rows of uint8": (np.eye(4, dtype=np.uint8)[LABELS], NUMBERS),
    "one-hot rows of fractions": (np.eye(4)[LABELS], NUMBERS),
    "class numbers as fractions": (LABELS.astype(np.float16), NUMBERS),
    "pictures as int64": (LABELS, RANDOM.integers(0, 256, (60, 5, 4, 3))),
    "grey pictures as uint16": (LABELS[:, None], RANDOM.integers(0, 256, (60, 5, 4)).astype(np.uint16)),
}


@pytest.mark.parametrize("kind", ARRAYS_IN_ARCHIVES)
def test_arrays_in_archives(kind, tmp_path):
    targets, inputs = ARRAYS_IN_ARCHIVES[kind]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(60):
            add(tar, str(number), **{"x.npy": npy(inputs[number]), "y.npy": npy(targets[number])})
    fields = {"input_fields": ("x.npy",), "target_field": "y.npy"}
    dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", **fields)
    assert (dataset.task, dataset.num_classes) == ("classification", 4)
    read, labels = dataset.validation.read(np.arange(6), epoch=0)
    expected = inputs[..., None] if inputs.ndim == 3 else inputs
    numbers = [int(np.flatnonzero([np.array_equal(one, sample) for one in expected])[0]) for sample in read]
    assert labels.tolist() == LABELS[numbers].tolist()
    assert read.dtype == (np.float32 if inputs.ndim == 2 else np.uint8)


def test_samples_of_another_type_are_not_forced_into_that_of_the_first(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(12):
            picture = np.full((4, 4), 9 if number < 11 else 300, np.int16 if number < 11 else np.int64)
            add(tar, str(number), **{"x.npy": npy(picture), "cls": b"1"})
    with pytest.raises(UserError, match="expected int16 of shape .4, 4., as in the first sample, .* received int64"):
        dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",))
        for split in (dataset.train, dataset.validation):
            split.read(np.arange(len(split)), epoch=0)


def test_pictures_as_lists_of_numbers(tmp_path):
    pixels = RANDOM.integers(0, 256, (20, 5, 4))
    pyarrow.parquet.write_table(pa.table({"x": pixels.tolist(), "y": LABELS[:20]}), tmp_path / "a.parquet")
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache")
    inputs, _ = dataset.train.read(np.arange(18), epoch=0)
    assert dataset.input_type == "uint8" and {*map(bytes, inputs)} < {*map(bytes, pixels.astype(np.uint8))}
    pixels[7, 3, 2] = 256
    pyarrow.parquet.write_table(pa.table({"x": pixels.tolist(), "y": LABELS[:20]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="expected pixels from 0 to 255 in .*, received int64 from 0 to 256"):
        opened(f"parquet:{tmp_path}", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_paths_without_bytes_are_refused(kind, tmp_path):
    images = [{"bytes": None, "path": f"img/{number}.jpg"} for number in range(9)]
    for column, line in (
        (images, "received the path img/0.jpg without bytes in row 0 .9 such rows.; write the content"),
        ([{"bytes": png(), "path": "p"}, *images[1:]], "received the path img/1.jpg without bytes in row 1 .8 such"),
        ([one["path"] for one in images], "received string such as img/0.jpg; .* paths of images are not opened"),
    ):
        table = pa.table({"image": column, "label": list(range(9))})
        if kind == "parquet":
            pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        else:
            with (tmp_path / "a.arrow").open("wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table)
        with pytest.raises(UserError, match=line):
            opened(f"{kind}:{tmp_path}", tmp_path / "cache")


def test_a_data_set_of_hugging_face_is_read_without_a_word(tmp_path, capfd):
    (tmp_path / "train").mkdir()
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        (tmp_path / name).write_text(json.dumps({}))
    arrow(tmp_path / "train" / "data-00000-of-00001.arrow", A)
    assert len(rows_of(opened(f"hf:{tmp_path}", tmp_path / "cache"))) == 30 and capfd.readouterr().err == ""
    arrow(tmp_path / "train" / "cache-12.arrow", A)
    assert len(rows_of(opened(f"hf:{tmp_path}", tmp_path / "cache"))) == 30
    assert "cache-*, which other programs keep: 1, such as train/cache-12.arrow" in capfd.readouterr().err


def test_what_an_earlier_data_set_left_in_the_folder_is_passed_over(tmp_path, capfd):
    """Oracle: load_from_disk of `datasets` 5.2.0, which reads what these files name."""
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        for number in range(2):
            arrow(tmp_path / name / f"{number}.arrow", (A, B)[number])
        state = {"_data_files": [{"filename": "0.arrow"}], "_indices_data_files": None}
        (tmp_path / name / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["new"]}))
    assert rows_of(opened(f"hf:{tmp_path}", tmp_path / "cache")) == list(range(30))
    assert "files of an earlier data set: 3, such as new/1.arrow" in capfd.readouterr().err
    (tmp_path / "new" / "state.json").write_text(json.dumps({"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(UserError, match="without indices in .*new, received one that an old version of datasets"):
        opened(f"hf:{tmp_path}", tmp_path / "cache")


def test_lists_with_gaps_are_refused(tmp_path):
    rows = NUMBERS.reshape(60, 3, 1).tolist()
    rows[5][1] = None
    pyarrow.parquet.write_table(pa.table({"x": rows, "y": LABELS}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="expected a value in each place of x of .*, received 1 nulls; fill them"):
        opened(f"parquet:{tmp_path}", tmp_path / "cache")


def test_records_of_json_are_no_names_of_classes(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(12):
            add(tar, f"{number}", jpg=png("JPEG"), json=json.dumps({"label": number % 3}).encode())
    with pytest.raises(UserError, match="as the target in .*a.tar, 0, received .*label.*name another --target-field"):
        opened(f"webdataset:{tmp_path}", tmp_path / "cache", target_field="json")


def test_classes_without_a_sample_have_an_output(tmp_path):
    features = {"info": {"features": {"y": {"names": ["a", "b", "c", "d"], "_type": "ClassLabel"}}}}
    table = pa.table({"x": NUMBERS.tolist(), "y": LABELS % 3}).replace_schema_metadata(
        {"huggingface": json.dumps(features)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache")
    assert (dataset.num_classes, dataset.class_names) == (4, ("a", "b", "c", "d"))


def test_records_in_files_of_any_name(tmp_path, capfd):
    def record(number: int) -> bytes:
        example = example_class()()
        example.features.feature.add(key=b"x").value.float_list.value.extend(NUMBERS[number].tolist())
        example.features.feature.add(key=b"y").value.bytes_list.value.append(NAMES[LABELS[number]].encode())
        return example.SerializeToString()

    for name, part in (("mnist.tfrecord-00000-of-00002", A), ("b.TFRECORDS", B), ("c.tfrecord.gz", C), ("d.record", C)):
        with io.BytesIO() as stream:
            writer = RecordWriter(stream)
            for number in range(60)[part]:
                writer.write(record(number))
            data = stream.getvalue()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert rows_of(opened(f"tfrecord:{tmp_path}", tmp_path / "cache")) == list(range(60))
    assert "1, such as d.record" in capfd.readouterr().err


def write_records(path: Path, records: list[dict[str, tuple[str, list]]]) -> None:
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        for record in records:
            example = example_class()()
            for name, (kind, values) in record.items():
                getattr(example.features.feature.add(key=name.encode()).value, kind).value.extend(values)
            writer.write(example.SerializeToString())


RECORDS = {
    "several names": ({"label": ("bytes_list", [b"cat", b"dog"])}, "as the target in .*, received .*cat.*dog"),
    "several images": ({"x": ("bytes_list", [b"?", b"!"])}, "expected the inputs of .* numbers"),
    "a label that is missing": ({"label": ("int64_list", [])}, "expected a field label in .*, received class, x; name"),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_records_with_more_or_less_than_a_value_are_refused(kind, tmp_path):
    other, line = RECORDS[kind]
    usual = {"x": ("float_list", [1.0]), "label": ("int64_list", [1]), "class": ("int64_list", [5])}
    first = [usual] * (kind == "a label that is missing")
    write_records(tmp_path / "a.tfrecord", [*first, *[{**usual, **other}] * 9])
    with pytest.raises(UserError, match=line):
        opened(f"tfrecord:{tmp_path}", tmp_path / "cache")


def test_whole_numbers_of_several_fields_are_no_tokens(tmp_path):
    records = [{name: ("int64_list", [7 * number]) for name in ("a", "b", "y")} for number in range(9)]
    write_records(tmp_path / "a.tfrecord", records)
    pyarrow.parquet.write_table(pa.table({name: [7 * n for n in range(9)] for name in "aby"}), tmp_path / "a.parquet")
    for kind in ("tfrecord", "parquet"):
        dataset = opened(f"{kind}:{tmp_path}", tmp_path / kind, input_fields=("a", "b"))
        inputs, labels = dataset.train.read(np.arange(8), epoch=0)
        np.testing.assert_array_equal(inputs, np.stack([labels, labels], 1).astype(np.float32), strict=True)


def named(path: Path, part: slice, names: str, kind: str = "int64", field: str = "label") -> None:
    features = {"info": {"features": {field: {"names": [*names], "_type": "ClassLabel"}}}}
    table = pa.table({"x": NUMBERS[part].tolist(), field: pa.array(LABELS[part]).cast(kind)})
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), path)


@pytest.mark.parametrize("other", ["train-1", "test-0"])
def test_classes_in_another_order_are_refused(other, tmp_path):
    for name, part, names in (("train-0", A, "abcd"), (other, B, "bacd")):
        named(tmp_path / f"{name}.parquet", part, names)
    with pytest.raises(UserError, match="expected the same class.*, received a, b, c, d .*b, a, c, d"):
        opened(f"parquet:{tmp_path}", tmp_path / "cache")


def test_targets_of_another_column_in_the_other_part_are_refused(tmp_path):
    named(tmp_path / "train.parquet", A, "abcd", field="y")
    named(tmp_path / "test.parquet", A, "abcd", field="label")
    with pytest.raises(UserError, match="the same fields in both parts of .*, received x, y to train and x, label to"):
        opened(f"parquet:{tmp_path}", tmp_path / "cache")


def test_files_of_other_types_of_numbers_are_one_table(tmp_path):
    """Oracle: the values that were written; `datasets` reads them, too."""
    for name, part, kind in (("train-0", A, "int64"), ("train-1", B, "int32"), ("test-0", C, "uint8")):
        named(tmp_path / f"{name}.parquet", part, "abcd", kind)
    assert rows_of(opened(f"parquet:{tmp_path}", tmp_path / "cache")) == list(range(60))


def test_an_image_beside_numbers_is_refused(tmp_path):
    pyarrow.parquet.write_table(pa.table({"i": [png()] * 9, "age": range(9), "y": range(9)}), tmp_path / "a.parquet")
    for fields in (("i", "age"), ("age", "i")):
        with pytest.raises(UserError, match="expected numbers.* in .*i.* received (large_)?binary"):
            opened(f"parquet:{tmp_path}", tmp_path / "cache", input_fields=fields)
