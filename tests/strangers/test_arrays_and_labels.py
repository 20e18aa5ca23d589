"""Arrays and labels as other people have them: trained by their meaning, or refused in one line.

Oracles: scikit-learn's LabelEncoder and type_of_target for labels, NumPy for inputs, or the exact line.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.multiclass import type_of_target

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import NUMBERS
from allstep.common.data.datasets import DataConfig, Dataset, load
from allstep.common.data.formats.python_file import as_dataset

RANDOM = np.random.default_rng(0)
NUM_SAMPLES, NUM_CLASSES = 60, 5
LABELS = RANDOM.permutation(np.arange(NUM_SAMPLES) % NUM_CLASSES)
INPUTS = RANDOM.normal(size=(NUM_SAMPLES, 4)).astype(np.float32)
ONE_HOT = np.eye(NUM_CLASSES)[LABELS]
NAMES = np.array(["ant", "bee", "cat 2", "Dog", "élan"])[LABELS]


def opened(inputs: object, targets: object, where: str, task: str = "auto") -> Dataset:
    return as_dataset((inputs, targets), (inputs, targets), DataConfig(task=task), where=where)


def read(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    return dataset.train.read(np.arange(len(dataset.train)), epoch=0)


CLASSES = {
    **{f"class numbers as {kind}": LABELS.astype(kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")},
    **{f"class numbers as {kind}": LABELS.astype(kind) for kind in ("f2", "f4", "f8")},
    "a column of class numbers": LABELS[:, None],
    "class numbers of shape (n, 1, 1)": LABELS[:, None, None],
    "a column of fractions": LABELS[:, None].astype(np.float64),
    "booleans": LABELS % 2 == 0,
    "a column of booleans": (LABELS % 2 == 0)[:, None],
    "a list": LABELS.tolist(),
    "objects that are numbers": LABELS.astype(object),
    "objects that are arrays": np.array([*map(np.int16, LABELS)], object),
    "names": NAMES,
    "a column of names": NAMES[:, None],
    "a list of names": NAMES.tolist(),
    "objects that are names": NAMES.astype(object),
    "bytes that are names": np.char.encode(NAMES, "utf-8"),
    "names that are digits": LABELS.astype(str),
    "strings of any length": NAMES.astype(np.dtypes.StringDType()),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_labels_become_the_classes_of_scikit_learn(kind):
    targets = CLASSES[kind]
    flat = np.asarray(targets).reshape(NUM_SAMPLES)
    plain = np.array([item.decode() if isinstance(item, bytes) else item for item in flat.tolist()])
    assert type_of_target(plain) in ("binary", "multiclass")
    dataset = opened(INPUTS, targets, kind)
    assert dataset.task == "classification" and dataset.num_classes == len(set(flat.tolist()))
    np.testing.assert_array_equal(read(dataset)[1], LabelEncoder().fit_transform(plain))


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "?", "O"])
def test_one_hot_rows_become_classes(kind, capfd):
    for rows in (ONE_HOT.astype(kind), ONE_HOT.astype(kind)[:, None]):
        dataset = opened(INPUTS, rows, f"one-hot {kind}")
        assert (dataset.task, dataset.num_classes) == ("classification", NUM_CLASSES)
        np.testing.assert_array_equal(read(dataset)[1], LABELS)
    err = capfd.readouterr().err
    expected = (
        f"allstep: warning: the targets of one-hot {kind} are one-hot rows: trained as 5 classes, unless --task reg"
    )
    assert err.count("\n") == err.count(expected) == (np.dtype(kind).kind == "f" or kind == "O")


NUMBERS_OF = {
    "fractions": (RANDOM.normal(size=NUM_SAMPLES), "", "auto"),
    "rows of fractions": (RANDOM.normal(size=(NUM_SAMPLES, 3)), "", "auto"),
    "whole fractions with gaps": (LABELS * 2.0, "are whole numbers: trained as numbers, unless --task classif", "auto"),
    "as many whole fractions as samples": (np.arange(60.0), "are whole numbers: trained as numbers", "auto"),
    "answers of several labels": ((RANDOM.random((60, 4)) > 0.5) * 1.0, "--loss bce for several labels", "auto"),
    "shares of classes": (ONE_HOT * 0.9 + 0.02, "rows that add up to 1: trained as numbers", "auto"),
    "class numbers for numbers": (LABELS, "", "regression"),
    "a column of numbers": (LABELS[:, None], "", "regression"),
    "one-hot rows for numbers": (ONE_HOT, "", "regression"),
    "whole fractions for a loss of numbers": (LABELS * 1.0, "", NUMBERS),
    "one-hot rows for a loss of numbers": (ONE_HOT, "", NUMBERS),
}


@pytest.mark.parametrize("kind", NUMBERS_OF)
def test_numbers_stay_numbers_and_a_line_says_so(kind, capfd):
    targets, line, task = NUMBERS_OF[kind]
    dataset = opened(INPUTS, targets, kind, task)
    expected = np.asarray(targets, np.float32).reshape(NUM_SAMPLES, -1)
    assert (dataset.task, dataset.num_classes) == ("regression", expected.shape[1])
    np.testing.assert_array_equal(read(dataset)[1], expected)
    err = capfd.readouterr().err
    assert line in err and err.count("\n") == bool(line)


def test_a_loss_decides_about_targets_that_may_be_both():
    config = DataConfig()
    assert [config.task_with(loss) for loss in (None, "cross-entropy", "bce", "mine.py:loss")] == [
        "auto", "auto", NUMBERS, NUMBERS,
    ]  # fmt: skip
    assert DataConfig(task="classification").task_with("mse") == "classification"
    dataset = opened(INPUTS, LABELS, "labels for a loss of numbers", NUMBERS)
    assert dataset.task == "classification"  # and the loss is refused


def test_whole_fractions_with_gaps_are_classes_if_asked():
    dataset = opened(INPUTS, LABELS * 2.0, "gaps", "classification")
    assert (dataset.task, dataset.num_classes) == ("classification", 9)
    np.testing.assert_array_equal(read(dataset)[1], LABELS * 2)


def test_labels_with_wide_gaps_are_told(capfd):
    assert opened(INPUTS, LABELS * 225_000, "wide").num_classes == 900_001
    assert "go up to 900000, so the network has 900001 outputs, but only 5 different" in capfd.readouterr().err
    opened(INPUTS, LABELS * 12, "narrow")
    assert capfd.readouterr().err == ""


def test_targets_with_a_class_for_most_samples_are_told(capfd):
    """scikit-learn's type_of_target warns of the same."""
    for name, targets in (("ages", np.arange(NUM_SAMPLES)), ("captions", [f"{n} cats" for n in range(NUM_SAMPLES)])):
        dataset = as_dataset((INPUTS, targets), (INPUTS[:9], targets[:9]), DataConfig(), where=name)
        assert dataset.num_classes == NUM_SAMPLES
        assert f"the 69 targets of {name} are 60 classes; numbers need --task reg" in capfd.readouterr().err


class Reading:
    """Samples read by their indices, without an array of all targets."""

    def __init__(self, targets: np.ndarray) -> None:
        self.all = targets

    def __len__(self) -> int:
        return len(self.all)

    def read(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        return INPUTS[indices], self.all[indices]


def test_targets_that_are_read_are_what_the_first_ones_are():
    dataset = as_dataset(Reading(ONE_HOT), None, DataConfig(validation_share=0.2), where="read")
    assert (dataset.task, dataset.num_classes) == ("classification", 5)
    inputs, labels = read(dataset)
    numbers = [int(np.flatnonzero((row == INPUTS).all(1))[0]) for row in inputs]
    np.testing.assert_array_equal(labels, LABELS[numbers])
    rows = ONE_HOT.copy()
    rows[1] = 0.2
    dataset = as_dataset(Reading(rows), Reading(ONE_HOT), DataConfig(), where="read")
    with pytest.raises(UserError, match="expected classes as the targets of read .*, received a row that is not one"):
        read(dataset)


def test_names_that_are_read_are_known_before():
    names = np.array(["cat"] * NUM_SAMPLES)
    names[3] = "ant"
    with pytest.raises(UserError, match="expected read to say which names its targets have; give the object targets, "):
        as_dataset(Reading(names), None, DataConfig(), where="read")
    samples = Reading(names)
    samples.class_names = ["cat", "ant"]
    dataset = as_dataset(samples, None, DataConfig(), where="read")
    assert dataset.class_names == ("cat", "ant")
    assert samples.read(np.arange(NUM_SAMPLES), 0)[1].tolist() == [
        dataset.class_names[label] for label in dataset.train.whole.read(np.arange(NUM_SAMPLES), epoch=0)[1]
    ]
    names[4] = "eel"
    with pytest.raises(UserError, match="received eel, which is none of their names"):
        dataset.train.whole.read(np.arange(NUM_SAMPLES), epoch=0)


REFUSED = {
    "complex": (LABELS * 1j, "auto", "expected the targets of .* numbers or names, .* received complex128"),
    "dates": (LABELS.astype("M8[s]"), "auto", "received datetime64"),
    "nothing": (np.array([None] * 60), "auto", "types that differ"),
    "names and numbers": (np.array(["a", 1] * 30, object), "auto", "types that differ"),
    "names and missing ones": (np.array(["a", np.nan] * 30, object), "auto", "types that differ"),
    "masked": (np.ma.masked_equal(LABELS, 3), "auto", "received a masked array"),
    "missing numbers": (np.where(LABELS == 3, np.nan, LABELS), "auto", "finite numbers, received nan in sample"),
    "negative": (LABELS - 1, "auto", "labels from 0 to 1048575 .*, received -1"),
    "several names": (np.stack([NAMES, NAMES], 1), "auto", "expected numbers as the targets .* received text such as"),
    "names for numbers": (NAMES, "regression", "expected numbers as the targets .* received text such as"),
    "several numbers": (np.stack([LABELS, LABELS], 1), "auto", r"received int64 \(2,\); give one .* --task regression"),
    "fractions for classes": (LABELS + 0.5, "classification", r"expected classes .* received \d.5; correct that"),
    "rows for classes": (INPUTS, "classification", "received rows of 4 numbers that are not one-hot"),
    "bytes that are no text": (
        np.array([b"\xff\xfe"] * 60),
        "auto",
        "expected the targets of .* to be numbers or names",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_labels_without_a_meaning_are_refused(kind):
    targets, task, line = REFUSED[kind]
    with pytest.raises(UserError, match=line) as caught:
        opened(INPUTS, targets, "the samples", task)
    assert "\n" not in str(caught.value)


PIXELS = RANDOM.integers(0, 256, (NUM_SAMPLES, 6, 5, 3))
BRAIN = INPUTS.astype(ml_dtypes.bfloat16)
INPUT_CASES = {
    **{
        f"pictures as {kind}": (PIXELS.astype(kind), PIXELS.astype(np.uint8)) for kind in ("u1", "u2", "i4", "i8", "u8")
    },
    "grey pictures as int64": (PIXELS[..., 0], PIXELS[..., :1].astype(np.uint8)),
    "black and white as int8": ((PIXELS > 9)[..., 0].astype(np.int8), (PIXELS > 9)[..., :1].astype(np.uint8)),
    "objects that are pictures": (np.array([*PIXELS.astype(np.uint8), None], object)[:-1], PIXELS.astype(np.uint8)),
    "objects that are numbers": (INPUTS.astype(object), INPUTS),
    "half precision": (INPUTS.astype(np.float16), INPUTS.astype(np.float16).astype(np.float32)),
    "brain floats": (BRAIN, BRAIN.astype(np.float32)),
    "4 bits": ((PIXELS % 8).astype(ml_dtypes.int4), (PIXELS % 8).astype(np.uint8)),
    "tokens as int16": (LABELS[:, None].astype(np.int16).repeat(3, 1), LABELS[:, None].repeat(3, 1)),
}


@pytest.mark.parametrize("kind", INPUT_CASES)
def test_inputs_are_what_is_in_them(kind):
    given, expected = INPUT_CASES[kind]
    inputs, _ = read(opened(given, LABELS, kind))
    assert inputs.dtype == expected.dtype
    np.testing.assert_array_equal(inputs, expected)


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        (
            PIXELS.astype(np.uint16) * 257,
            "expected pixels from 0 to 255 in .*, received uint16 from 0 to 65535; conv",
        ),
        (PIXELS - 128, "received int64 from -128 to 127; convert them to uint8, or to fractions"),
        (np.array([np.zeros(3), np.zeros(4)] * 30, object), "of one shape for all samples"),
        (np.ma.masked_greater(INPUTS, 1), "received a masked array"),
        (np.array(["a"] * 60), "expected the inputs of the samples to be numbers"),
        (INPUTS.astype(complex), "received complex128 of shape .*; convert it to real numbers"),
        (scipy.sparse.csr_matrix(INPUTS), "received csr_matrix; convert it to an array of NumPy"),
    ],
)
def test_inputs_that_could_be_anything_are_refused(inputs, line):
    with pytest.raises(UserError, match=line):
        opened(inputs, LABELS, "the samples")


@pytest.mark.parametrize("part", ["val", "valid", "validation", "dev", "test", "testing", "eval"])
def test_parts_of_npz_files(part, tmp_path, capfd):
    arrays = {"X_train": INPUTS, "y_train": NAMES, f"X_{part}": INPUTS[:9], f"y_{part}": NAMES[:9], "about": LABELS}
    np.savez(tmp_path / "a b.npz", **arrays)
    dataset = load(DataConfig(f"npz:{tmp_path}/a b.npz", data_dir=Path(tmp_path)))
    assert (len(dataset.train), len(dataset.validation), dataset.num_classes) == (60, 9, 5)
    assert f"passed over arrays of other parts than train and {part}: 1, such as about" in capfd.readouterr().err


def test_npz_files_with_more_than_arrays_of_numbers(tmp_path):
    """Only the chosen arrays are read, so others may be what they are."""
    path = tmp_path / "a.npz"
    np.savez(path, age=LABELS, height=INPUTS[:, 0], y=LABELS, about=np.array({"by": "me"}, object))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("README.txt", "?")
    dataset = load(DataConfig(f"npz:{path}", data_dir=tmp_path, input_fields=("age", "height")))
    expected = np.column_stack([LABELS, INPUTS[:, 0]]).astype(np.float32)
    np.testing.assert_array_equal(dataset.train.whole.inputs, expected, strict=True)
    dataset = load(DataConfig(f"npz:{path}", data_dir=tmp_path, input_fields=("age", "y")))
    assert dataset.input_type == "float32"
    with pytest.raises(UserError, match="about: it holds objects of Python"):
        load(DataConfig(f"npz:{path}", data_dir=tmp_path, input_fields=("about",)))


@pytest.mark.parametrize(
    ("arrays", "line"),
    [
        ({"x_train": INPUTS, "train_x": INPUTS, "y_train": LABELS}, "received x_train and train_x; rename one"),
        (
            {"x_train": INPUTS, "y_train": LABELS, "label_train": LABELS, "x_test": INPUTS, "label_test": LABELS},
            "the same fields in both parts of .*, received x, y to train and x, label to validate",
        ),
    ],
)
def test_npz_files_of_two_meanings_are_refused(arrays, line, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=line):
        load(DataConfig(f"npz:{tmp_path}/a.npz", data_dir=tmp_path))
