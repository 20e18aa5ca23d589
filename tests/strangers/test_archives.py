"""Tar archives of samples as other people have them: all members are read, or a line says what is not.

Oracles: the values that were written, by NumPy and tarfile, or the exact line.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tarfile

import numpy as np
import pytest
from other_data import LABELS, NUMBERS, RANDOM, A, add, archive, npy, opened, png, rows_of

from allstep.common.base.errors import UserError

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


def test_labels_in_json_and_fields_that_are_left_out(tmp_path, capfd):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(12):
            about = {"image": "a.png", "label": number % 3, "url": None}
            add(tar, f"{number:02}", json=json.dumps(about).encode(), **{"x.npy": npy(NUMBERS[number])}, txt=b"?")
    dataset = opened(f"webdataset:{tmp_path}", tmp_path / "cache", input_fields=("x.npy",))
    inputs, labels = dataset.train.read(np.arange(len(dataset.train)), epoch=0)
    expected = [int(np.flatnonzero((row == NUMBERS).all(1))[0]) % 3 for row in inputs]
    np.testing.assert_array_equal(labels, expected)
    assert dataset.num_classes == 3 and "besides x.npy and label: 12, such as txt\n" in capfd.readouterr().err


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


def test_records_of_json_are_no_names_of_classes(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(12):
            add(tar, f"{number}", jpg=png("JPEG"), json=json.dumps({"label": number % 3}).encode())
    with pytest.raises(UserError, match="as the target in .*a.tar, 0, received .*label.*name another --target-field"):
        opened(f"webdataset:{tmp_path}", tmp_path / "cache", target_field="json")
