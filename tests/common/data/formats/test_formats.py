"""User data sets in every format, read in any order, and damaged ones.

Oracle: the arrays that were written. The files are written by NumPy, pyarrow, tarfile and TensorBoard's RecordWriter,
none of which shares code with our readers; `OF_TENSORFLOW` was written by TensorFlow 2.21's tf.io.TFRecordWriter.
"""

from __future__ import annotations

import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from tensorboard.summary.writer.record_writer import RecordWriter
from written_formats import (
    COLOURS,
    LABELS,
    NUM_SAMPLES,
    NUMBERS,
    OF_TENSORFLOW,
    RANDOM,
    TRAIN,
    VALIDATION,
    WRITERS,
    add,
    example,
    npy,
    opened,
    parquet,
    png,
    tfrecord,
)

from allstep.common.base.errors import UserError
from allstep.common.catalog.networks import check_inputs


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("kind", WRITERS)
def test_any_sample_is_reached_in_any_order(kind, images, tmp_path):
    for name, part in (("train", TRAIN), ("test", VALIDATION)):
        (tmp_path / "set" / name).mkdir(parents=True)
        WRITERS[kind](tmp_path / "set" / name / "data-00000", part, images=images)
    dataset = opened(f"{kind}:{tmp_path}/set", tmp_path / "cache")
    assert (dataset.task, dataset.num_classes) == ("classification", 5)
    assert dataset.input_shape == ((8, 8, 3) if images else (6,))
    for split, part in ((dataset.train, TRAIN), (dataset.validation, VALIDATION)):
        order = np.random.default_rng(1).permutation(len(split))
        inputs, labels = split.read(order, epoch=3)
        np.testing.assert_array_equal(labels, LABELS[part][order])
        expected = COLOURS[part][order] if images else NUMBERS[part][order]
        np.testing.assert_array_equal(inputs[:, 4, 4] if images else inputs, expected)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_share_is_held_out_by_the_seed(kind, tmp_path):
    (tmp_path / "set").mkdir()
    for number, part in enumerate((TRAIN, VALIDATION)):
        WRITERS[kind](tmp_path / "set" / f"data-{number}", part, images=False)

    def held(seed: int) -> set[int]:
        dataset = opened(f"{kind}:{tmp_path}/set", tmp_path / "cache", seed=seed, validation_share=0.25)
        parts = [split.read(np.arange(len(split)), epoch=0)[0] for split in (dataset.train, dataset.validation)]
        found = [[int(np.flatnonzero((row == NUMBERS).all(1))[0]) for row in part] for part in parts]
        assert sorted(found[0] + found[1]) == list(range(NUM_SAMPLES)) and len(found[1]) == 10
        return set(found[1])

    assert held(0) == held(0) != held(1)


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_share_beside_a_validation_part_is_told(share, tmp_path, capsys):
    for name, part in (("train", TRAIN), ("val", VALIDATION)):
        parquet(tmp_path / name, part, images=False)
    dataset = opened(f"parquet:{tmp_path}", tmp_path / "cache", validation_share=share)
    assert len(dataset.validation) == len(LABELS[VALIDATION])
    told = "allstep: warning: --validation-share has no effect on parquet:"
    assert capsys.readouterr().err.count(told) == (share != 0.1)


@pytest.mark.parametrize("task", ["next-token", "classification"])
@pytest.mark.parametrize("kind", ["npz", *WRITERS])
def test_tokens(kind, task, tmp_path):
    """The number of tokens follows from both inputs and targets, either of which may have the largest."""
    tokens = np.arange(20).reshape(5, 4)
    inputs, targets = tokens[:, :-1], tokens[:, 1:] if task == "next-token" else np.arange(5) % 2
    flags = {}
    if kind == "npz":
        inputs, targets = (targets, inputs) if task == "next-token" else (inputs, targets)
        np.savez(tmp_path / "a.npz", x=inputs, y=targets)
    elif kind == "tfrecord":
        with (tmp_path / "a.tfrecord").open("wb") as stream:
            writer = RecordWriter(stream)
            for x, y in zip(inputs, targets, strict=True):
                writer.write(example(x=x, y=np.atleast_1d(y)))
    elif kind == "webdataset":
        flags = {"input_fields": ("x.npy",), "target_field": "y.npy"}
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for number, (x, y) in enumerate(zip(inputs, targets, strict=True)):
                files = {"y.npy": npy(y), "txt": b"?", "x.npy": npy(x)}
                add(archive, "ä" * 120 + str(number), **files)  # a name that needs more than one header block
    else:
        rows = pa.table({"x": inputs.tolist(), "y": targets.tolist()})
        if kind == "parquet":
            pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
        else:
            with (tmp_path / "a.arrow").open("wb") as stream, pa.ipc.new_stream(stream, rows.schema) as writer:
                writer.write_table(rows, max_chunksize=2)
    dataset = opened(f"{kind}:{tmp_path}" + "/a.npz" * (kind == "npz"), tmp_path / "cache", **flags)
    assert (dataset.task, dataset.input_shape) == (task, (3,))
    assert (dataset.num_classes, dataset.num_tokens) == ((20, 20) if task == "next-token" else (2, 19))
    read = [split.read(np.arange(len(split))[::-1], epoch=0) for split in (dataset.train, dataset.validation)]
    first = np.concatenate([one[0][:, 0] for one in read])
    order = np.argsort(first)
    np.testing.assert_array_equal(np.concatenate([one[0] for one in read])[order], inputs)
    np.testing.assert_array_equal(np.concatenate([one[1] for one in read])[order], targets)


def test_records_of_tensorflow(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(OF_TENSORFLOW * 3)
    dataset = opened(f"tfrecord:{tmp_path}", tmp_path / "cache", validation_share=0.3)
    inputs, labels = dataset.train.read(np.array([1]), epoch=0)
    assert inputs.tolist() == [[0.5, -2.0]] and labels.tolist() == [3] and dataset.num_classes == 4


def test_an_index_is_built_once_and_anew_for_other_files(tmp_path):
    tfrecord(tmp_path / "a", TRAIN, images=False)
    indexes = tmp_path / "cache" / "derived"
    opened(f"tfrecord:{tmp_path}", tmp_path / "cache")
    [built] = indexes.glob("*.npy")
    written = built.stat().st_mtime_ns
    opened(f"tfrecord:{tmp_path}", tmp_path / "cache")
    assert [path.stat().st_mtime_ns for path in indexes.glob("*.npy")] == [written]
    tfrecord(tmp_path / "a", VALIDATION, images=False)
    assert len(opened(f"tfrecord:{tmp_path}", tmp_path / "cache", validation_share=0.5).train) == 5


def test_npz(tmp_path):
    x, y = NUMBERS, NUMBERS[:, :2]
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:7], y_test=y[:7])
    dataset = opened(f"npz:{tmp_path}/a.npz", tmp_path)
    assert (dataset.task, dataset.num_classes, len(dataset.validation)) == ("regression", 2, 7)
    np.testing.assert_array_equal(dataset.train.read(np.array([5, 2]), epoch=0)[0], NUMBERS[[5, 2]])
    grey = RANDOM.integers(0, 256, (20, 4, 5)).astype(np.uint8)
    np.savez(tmp_path / "b.npz", images=grey, labels=LABELS[:20, None], more=NUMBERS[:20])
    dataset = opened(f"npz:{tmp_path}/b.npz", tmp_path)
    assert dataset.input_shape == (4, 5, 1) and dataset.task == "classification"
    trained = dataset.train.read(np.arange(len(dataset.train)), epoch=0)[0] / 255
    assert dataset.mean == pytest.approx((trained.mean(),)) and dataset.std == pytest.approx((trained.std(),))


PYTHON_FILE = """
import numpy as np
x, y = np.arange(40).reshape(20, 2), np.arange(40).reshape(20, 2) + 1
def arrays():
    return x, y, x[:5], y[:5]
def pairs():
    return (x, y), (x[:5], y[:5])
class Squares:
    num_classes = 400
    def __len__(self):
        return 20
    def read(self, indices, epoch):
        return np.stack([indices, indices + epoch], 1) * 0.5, indices**2
def read():
    return Squares()
class Texts:
    num_classes, num_tokens = 2, 7
    def __len__(self):
        return 20
    def read(self, indices, epoch):
        return np.stack([indices % 7, indices % 3], 1), indices % 2
def texts():
    return Texts()
def fails():
    return missing
"""


def test_a_function_of_the_users_own(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(PYTHON_FILE)
    for name in ("arrays", "pairs"):
        dataset = opened(f"{tmp_path}/mine.py:{name}", tmp_path)
        assert (dataset.task, dataset.num_classes, len(dataset.validation)) == ("next-token", 41, 5)
    assert capfd.readouterr().err.count(f"--dataset imports {tmp_path}/mine.py") == 1
    dataset = opened(f"{tmp_path}/mine.py:read", tmp_path, validation_share=0.5)
    inputs, labels = dataset.train.read(np.arange(10), epoch=2)
    np.testing.assert_array_equal(labels, (2 * inputs[:, 0]) ** 2)
    np.testing.assert_array_equal(inputs[:, 1], inputs[:, 0] + 1)
    dataset = opened(f"{tmp_path}/mine.py:texts", tmp_path, validation_share=0.5)
    assert (dataset.num_tokens, dataset.num_classes) == (7, 2)
    check_inputs("text-encoder", dataset)
    with pytest.raises(UserError, match="received NameError: .*missing.* in line 25 of .*mine.py"):
        opened(f"{tmp_path}/mine.py:fails", tmp_path)
    with pytest.raises(UserError, match="expected a function absent in .*mine.py"):
        opened(f"{tmp_path}/mine.py:absent", tmp_path)


RECORD = len(OF_TENSORFLOW)
FLIPPED = bytearray(OF_TENSORFLOW)
FLIPPED[40] ^= 1


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("tfrecord", {"a.tfrecord": OF_TENSORFLOW * 2 + OF_TENSORFLOW[:-1]}, f"byte {2 * RECORD}, received a damaged"),
        ("tfrecord", {"a.tfrecord": OF_TENSORFLOW + OF_TENSORFLOW[:5]}, "the file ends in its header"),
        ("tfrecord", {"a.tfrecord": OF_TENSORFLOW + bytes(FLIPPED)}, f"byte {RECORD}, .*its checksum is wrong"),
        ("tfrecord", {"a.tfrecord": b"\x00" * 50}, "the checksum of its length is wrong"),
        ("tfrecord", {"a.tfrecord": b""}, "expected samples in .* received files without any"),
        ("tfrecord", {}, "expected files .* received none"),
        ("webdataset", {"a.tar": b"no archive" * 100}, "expected a whole tar archive"),
        ("parquet", {"a.parquet": b"PAR1" * 9}, "expected a whole table in .*a.parquet"),
        ("hf", {"data-0.arrow": b"\xff\xff\xff\xff" * 9}, "expected a whole table"),
        ("hf", {"cache-0.arrow": b"\xff\xff\xff\xff" * 9}, "expected files .*arrow to train on"),
    ],
)  # fmt: skip
def test_damaged_files(kind, files, expected, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=expected):
        opened(f"{kind}:{tmp_path}", tmp_path / "cache")


@pytest.mark.parametrize(
    ("label", "expected"),
    [(np.array([0.5]), "an input and 1 fraction"), (np.array([2, 3]), "tokens, and those that follow")],
)
def test_records_of_another_kind(label, expected, tmp_path):
    with (tmp_path / "a.tfrecord").open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(example(x=np.array([0.5, 1.5]), y=3))
        writer.write(example(x=label, y=label))
    with pytest.raises(UserError, match=f"one kind .an input and a class., received another .*: {expected}"):
        opened(f"tfrecord:{tmp_path}", tmp_path / "cache")


def test_negative_tokens_are_for_networks_of_ones_own(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(-2, 18).reshape(5, 4), y=LABELS[:5])
    dataset = opened(f"npz:{tmp_path}/a.npz", tmp_path)
    with pytest.raises(UserError, match="expected tokens from 0 on, .* received negative ones"):
        check_inputs("text-encoder", dataset)


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_a_table_without_rows(kind, tmp_path):
    WRITERS[kind](tmp_path / "data", slice(0, 0), images=False)
    with pytest.raises(UserError, match="expected at least 2 samples in .* received 0"):
        opened(f"{kind}:{tmp_path}", tmp_path / "cache")


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": NUMBERS[:0], "y": LABELS[:0]}, "at least 1 sample"),
        ({"x": NUMBERS, "y": LABELS[:-1]}, "a target for each input .* 40 inputs and 39 targets"),
        ({"x": np.where(np.arange(40)[:, None] == 7, np.nan, NUMBERS), "y": LABELS}, "received nan in sample 7"),
        ({"x": NUMBERS, "y": LABELS - 1}, "labels from 0 to .* received -1"),
        ({"x": NUMBERS, "y": LABELS + 2**30}, "labels from 0 to 1048575"),
        ({"x": NUMBERS, "z": LABELS}, "a field of a usual name .* received x, z"),
        ({"x": np.array(["a"] * 40), "y": LABELS}, "to be numbers"),
        ({"x_train": NUMBERS, "y_train": LABELS, "x_val": NUMBERS[:, :3], "y_val": LABELS}, "one shape and type in"),
    ],
)
def test_arrays_from_which_nothing_can_be_learnt(arrays, expected, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=expected):
        opened(f"npz:{tmp_path}/a.npz", tmp_path)


def test_lists_of_several_lengths_and_pickles(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([[1], [1, 2]], dtype=object), y=LABELS[:2])
    with pytest.raises(UserError, match="expected arrays of numbers .* it holds objects of Python; convert it to"):
        opened(f"npz:{tmp_path}/a.npz", tmp_path)
    pyarrow.parquet.write_table(pa.table({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="expected lists of one length in x of the training part of parquet:"):
        opened(f"parquet:{tmp_path}", tmp_path)
    pyarrow.parquet.write_table(pa.table({"x": [1.0, None], "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="expected a value in each row of x"):
        opened(f"parquet:{tmp_path}", tmp_path)


def test_an_unreadable_image_is_named_or_replaced(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for index in range(10):
            add(archive, str(index), png=png(COLOURS[index]) if index != 4 else b"bad", cls=b"1")
    with pytest.raises(UserError, match=r"expected an image in .*a.tar, byte \d+, received .*neither JPEG nor PNG"):
        dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache")
        for split in (dataset.train, dataset.validation):
            split.read(np.arange(len(split)), epoch=0)
    dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", skip_unreadable=True)
    for split in (dataset.train, dataset.validation):
        split.read(np.arange(len(split)), epoch=0)
