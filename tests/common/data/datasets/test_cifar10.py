"""cifar10: intact and damaged archives in the published layout, written here."""

import contextlib
import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hostile_files import zeros_after
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import DataConfig, array_cache, cifar10, load, prepare

GENERATOR = np.random.default_rng(0)
NAMES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
IMAGES = {name: GENERATOR.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8) for name in NAMES}
LABELS = {name: GENERATOR.integers(0, 10, 4, dtype=np.uint8) for name in NAMES}


def records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return records of a label byte, then 1,024 bytes each of red, green and blue, row by row."""
    return b"".join(
        bytes([label]) + b"".join(image[:, :, channel].tobytes() for channel in range(3))
        for image, label in zip(images, labels, strict=True)
    )


CONTENTS = {f"cifar-10-batches-bin/{name}": records(IMAGES[name], LABELS[name]) for name in NAMES}


def write_archive(directory: Path, contents: dict[str, bytes], vouch) -> DataConfig:
    (directory / "cifar10").mkdir()
    with tarfile.open(directory / "cifar10" / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    vouch(directory / "cifar10")
    return DataConfig(dataset="cifar10", data_dir=directory)


def test_samples_in_the_order_of_the_batches(tmp_path, vouch):
    # The archive has another order.
    config = write_archive(tmp_path, dict(reversed(CONTENTS.items())), vouch)
    prepare(config)
    dataset = load(config)
    images, labels = dataset.train.read(np.arange(20), epoch=0)
    np.testing.assert_array_equal(images, np.concatenate([IMAGES[name] for name in NAMES[:5]]))
    np.testing.assert_array_equal(labels, np.concatenate([LABELS[name] for name in NAMES[:5]]))
    images, labels = dataset.validation.read(np.array([3, 0]), epoch=0)
    np.testing.assert_array_equal(images, IMAGES["test_batch.bin"][[3, 0]])
    assert labels.dtype == np.int64 and labels.tolist() == LABELS["test_batch.bin"][[3, 0]].tolist()
    assert dataset.input_shape == (32, 32, 3) and len(dataset.mean) == len(dataset.std) == 3


def test_a_hostile_archive_writes_nothing_elsewhere(tmp_path, vouch):
    evil = {"../../evil": b"", f"{tmp_path}/evil": b"", "cifar-10-batches-bin/../../evil": b""}
    config = write_archive(tmp_path, {**evil, **CONTENTS}, vouch)
    prepare(config)
    assert not list(tmp_path.rglob("evil")) and not (tmp_path.parent / "evil").exists()
    assert len(load(config).train) == 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "expected records of 3073 bytes in .*, received 0 bytes"),
        (CONTENTS["cifar-10-batches-bin/test_batch.bin"][:-1], "expected records of 3073 bytes in .*, received 12291"),
        (bytes([10]) + bytes(3072), "expected labels 0 to 9 in .*, received 10"),
        (None, "expected a file cifar-10-batches-bin/data_batch_3.bin in .*, received none"),
    ],
)
def test_a_bad_member_is_named(tmp_path, vouch, content, reason):
    contents = {**CONTENTS, "cifar-10-batches-bin/data_batch_3.bin": content}
    if content is None:
        del contents["cifar-10-batches-bin/data_batch_3.bin"]
    config = write_archive(tmp_path, contents, vouch)
    with pytest.raises(UserError, match=reason) as caught:
        prepare(config)
    assert "data_batch_3.bin" in str(caught.value)


@pytest.mark.parametrize("damage", [lambda body: body[:-5000], lambda body: b"", lambda body: b"x" * 999])
def test_a_damaged_archive(tmp_path, vouch, damage):
    config = write_archive(tmp_path, CONTENTS, vouch)
    path = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    path.write_bytes(damage(path.read_bytes()))
    vouch(path.parent)
    with pytest.raises(UserError, match="is damaged or cut short"):
        prepare(config)


def test_the_table_is_the_published_one(server, tmp_path):
    # Oracle: the size given by TensorFlow Datasets and the logs of tutorials.
    assert cifar10.FILES[0].num_bytes == 170_052_171
    with pytest.raises(UserError, match="put cifar-10-binary.tar.gz into .*cifar10, or give a --mirror"):
        prepare(DataConfig(dataset="cifar10", data_dir=tmp_path, mirror=server.url))


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf()


BOMBS = {
    "a member of another name": zeros_after(member("x", 2**33 - 1), 2**24),
    "a batch larger than any": zeros_after(member("cifar-10-batches-bin/data_batch_1.bin", 2**33 - 1), 2**21),
    "a header that goes on": zeros_after(member("x", 2**33 - 1, tarfile.XHDTYPE), 2**24),
    "a long name": zeros_after(member("x", 2**33 - 1, tarfile.GNUTYPE_LONGNAME), 2**24),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_ends_in_a_line(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(array_cache, "MAX_CONTENT_BYTES", 2**23)
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(BOMBS[kind])
    with pytest.raises(UserError, match="expected at most 8388608 bytes of content in .*, received"):
        cifar10.unpack(path)


def tarred(contents: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


TAR = tarred(CONTENTS)


@st.composite
def damaged_archives(draw) -> bytes:
    """Draw the archive with some bytes of its headers changed."""
    data = bytearray(TAR)
    for position, value in draw(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=4)):
        data[position] = value
    if draw(st.booleans()):  # make the header's checksum right
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return gzip.compress(bytes(data[: draw(st.sampled_from([len(data), 700, 5000]))]), 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(damaged_archives() | st.binary(max_size=600).map(gzip.compress) | st.binary(max_size=100))
def test_any_bytes_are_batches_or_a_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "archive.tar.gz"
    path.write_bytes(data)
    with contextlib.suppress(UserError):
        assert cifar10.unpack(path)["train_images"].shape == (20, 32, 32, 3)
