"""Tables and other files as other people have them: all files are read, or a line says what is not.

Oracles: the values that were written, by NumPy, pyarrow and tarfile, or the exact line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from other_data import LABELS, NAMES, NUMBERS, RANDOM, A, B, C, archive, opened, png, rows_of

from allstep.common.base.errors import UserError


def parquet(path: Path, part: slice) -> None:
    pyarrow.parquet.write_table(pa.table({"x": NUMBERS[part].tolist(), "y": LABELS[part]}), path)


def arrow(path: Path, part: slice) -> None:
    table = pa.table({"x": NUMBERS[part].tolist(), "y": LABELS[part]})
    with path.open("wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


FORMATS: dict[str, tuple[str, Callable[[Path, slice], None], dict]] = {
    "parquet": (".parquet", parquet, {}),
    "hf": (".arrow", arrow, {}),
    "webdataset": (".tar", archive, {"input_fields": ("x.npy",)}),
}
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


def test_pictures_as_lists_of_numbers(tmp_path):
    pixels = RANDOM.integers(0, 256, (20, 5, 4))
    pyarrow.parquet.write_table(pa.table({"x": pixels.tolist(), "y": LABELS[:20]}), tmp_path / "a.parquet")
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache")
    inputs, _ = dataset.train.read(np.arange(18), epoch=0)
    assert dataset.input_type == "uint8" and {*map(bytes, inputs)} < {*map(bytes, pixels.astype(np.uint8))}
    pixels[7, 3, :2] = 0, 256
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


def test_classes_without_a_sample_have_an_output(tmp_path):
    features = {"info": {"features": {"y": {"names": ["a", "b", "c", "d"], "_type": "ClassLabel"}}}}
    table = pa.table({"x": NUMBERS.tolist(), "y": LABELS % 3}).replace_schema_metadata(
        {"huggingface": json.dumps(features)}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache")
    assert (dataset.num_classes, dataset.class_names) == (4, ("a", "b", "c", "d"))


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
