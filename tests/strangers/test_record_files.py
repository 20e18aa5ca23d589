"""TFRecord files as other people have them. Oracles: what TensorBoard's RecordWriter wrote, or the exact line."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from other_data import LABELS, NAMES, NUMBERS, A, B, C, opened, png, rows_of
from tensorboard.summary.writer.record_writer import RecordWriter

from allstep.common.base.errors import UserError
from allstep.common.data.formats.tfrecord import example_class


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


@pytest.mark.parametrize("kind", ["parquet", "hf", "npz", "tfrecord"])
def test_fields_that_are_left_out_are_told(kind, tmp_path, capfd):
    columns = {"x": NUMBERS[:9, 0].tolist(), "id": [*range(9)], "label": [0, 1, 2] * 3}
    table, path = pa.table(columns), tmp_path / "a.npz" if kind == "npz" else tmp_path
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    elif kind == "hf":
        with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    elif kind == "npz":
        np.savez(path, **columns)  # pyright: ignore[reportArgumentType]
    else:
        kinds = {"x": "float_list", "id": "int64_list", "label": "int64_list"}
        rows = [{name: (kinds[name], [columns[name][row]]) for name in kinds} for row in range(9)]
        write_records(tmp_path / "a.tfrecord", rows)
    opened(f"{kind}:{path}", tmp_path / "cache")
    assert "passed over fields besides x and label: 1, such as id\n" in capfd.readouterr().err
    opened(f"{kind}:{path}", tmp_path / "another", input_fields=("x",), target_field="label")
    assert "besides" not in capfd.readouterr().err


def test_images_in_dictionaries(tmp_path):
    pictures = pa.array([png() for _ in range(3)] * 3)
    read = []
    for name, column in (("plain", pictures), ("dictionary", pictures.dictionary_encode())):
        (tmp_path / name).mkdir()
        pyarrow.parquet.write_table(pa.table({"image": column, "label": [0, 1, 2] * 3}), tmp_path / name / "a.parquet")
        dataset = opened(f"parquet:{tmp_path / name}", tmp_path / "cache")
        read.append(dataset.validation.read(np.arange(len(dataset.validation)), epoch=0))
    np.testing.assert_array_equal(read[1][0], read[0][0])
    np.testing.assert_array_equal(read[1][1], read[0][1])
