"""mnist and fashion-mnist: intact and damaged IDX files, written here from the format's description."""

import contextlib
import gzip
import hashlib
import os
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hostile_files import idx, zeros_after
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.data.datasets import DataConfig, load, mnist, prepare
from allstep.common.data.datasets.download import RemoteFile

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


GENERATOR = np.random.default_rng(0)
ARRAYS = {
    TRAIN_IMAGES: GENERATOR.integers(0, 256, (50, 28, 28), dtype=np.uint8),
    TRAIN_LABELS: np.arange(50, dtype=np.uint8) % 10,
    TEST_IMAGES: GENERATOR.integers(0, 256, (20, 28, 28), dtype=np.uint8),
    TEST_LABELS: np.arange(20, dtype=np.uint8) % 10,
}
FILES = {name: idx(array) for name, array in ARRAYS.items()}


@pytest.fixture
def published(monkeypatch) -> Iterator[None]:
    """Declare the small files to be the published ones, so that the whole path from mirror to batch can be run."""
    table = tuple(RemoteFile(name, len(body), hashlib.sha256(body).hexdigest()) for name, body in FILES.items())
    monkeypatch.setitem(mnist.FILES, "mnist", table)


def local_files(directory: Path, vouch, **changed: bytes) -> DataConfig:
    """Put the small files, some of them `changed`, where users put their own."""
    (directory / "mnist").mkdir(exist_ok=True)
    for name, body in {**FILES, **changed}.items():
        (directory / "mnist" / name).write_bytes(body)
    vouch(directory / "mnist")
    return DataConfig(dataset="mnist", data_dir=directory)


def check_samples(config: DataConfig) -> None:
    dataset = load(config)
    assert dataset.input_shape == (28, 28, 1) and dataset.num_classes == 10
    for split, images, labels in (
        (dataset.train, ARRAYS[TRAIN_IMAGES], ARRAYS[TRAIN_LABELS]),
        (dataset.validation, ARRAYS[TEST_IMAGES], ARRAYS[TEST_LABELS]),
    ):
        indices = np.random.default_rng(1).permutation(len(split))
        read_images, read_labels = split.read(indices, epoch=0)
        assert read_images.dtype == np.uint8 and read_labels.dtype == np.int64
        np.testing.assert_array_equal(read_images, images[indices][..., None])
        np.testing.assert_array_equal(read_labels, labels[indices])


def test_from_a_mirror_to_a_batch(published, server, tmp_path):
    server.answers.update(FILES)
    config = DataConfig(dataset="mnist", data_dir=tmp_path, mirror=server.url)
    prepare(config)
    prepare(config)
    assert sorted(server.requests) == sorted(FILES)
    check_samples(config)


def test_the_tables_are_the_published_ones():
    # Oracle: sizes as in the data sets' own descriptions, and the form of a SHA-256.
    for dataset, num_bytes in (("mnist", 11_594_722), ("fashion-mnist", 30_878_645)):
        files = mnist.FILES[dataset]
        assert [file.name for file in files] == [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS]
        assert sum(file.num_bytes for file in files) == num_bytes
        assert all(re.fullmatch("[0-9a-f]{64}", file.sha256) for file in files)


def test_the_two_data_sets_do_not_share_files(published, server, tmp_path):
    server.answers.update(FILES)
    prepare(DataConfig(dataset="mnist", data_dir=tmp_path, mirror=server.url))
    fashion = DataConfig(dataset="fashion-mnist", data_dir=tmp_path, mirror=server.url)
    with pytest.raises(UserError, match=f"expected .*fashion-mnist/{TRAIN_IMAGES}, or a mirror .*: it is missing"):
        prepare(fashion)
    with pytest.raises(UserError, match="is missing on this host"):
        load(fashion)


def test_arrays_are_mapped_not_read(published, server, tmp_path):
    # Ranks of a host share the page cache, so no rank may hold its own copy.
    server.answers.update(FILES)
    config = DataConfig(dataset="mnist", data_dir=tmp_path, mirror=server.url)
    prepare(config)
    images = load(config).train.inputs
    assert not images.flags.owndata and not images.flags.writeable
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("damage", [b"", b"changed", None], ids=["empty", "changed", "missing"])
def test_damaged_arrays_are_unpacked_again(published, server, tmp_path, damage):
    server.answers.update(FILES)
    config = DataConfig(dataset="mnist", data_dir=tmp_path, mirror=server.url)
    prepare(config)
    for name in ("train_images.npy", "validation_labels.npy", "SHA256SUMS"):
        (path,) = tmp_path.glob(f"mnist/unpacked-*/{name}")
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        prepare(config)
        check_samples(config)


def test_intact_arrays_are_left_alone(tmp_path, vouch):
    # Ranks of another run may have the arrays mapped, and rewriting them would delay start-up.
    config = local_files(tmp_path, vouch)
    prepare(config)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    prepare(config)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_a_changed_byte_in_the_arrays_is_noticed(published, server, tmp_path):
    server.answers.update(FILES)
    config = DataConfig(dataset="mnist", data_dir=tmp_path, mirror=server.url)
    prepare(config)
    (path,) = tmp_path.glob("mnist/unpacked-*/train_images.npy")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    prepare(config)
    check_samples(config)


def test_two_processes_prepare_at_once(tmp_path, vouch):
    local_files(tmp_path, vouch)
    program = (
        "import sys; from pathlib import Path; from allstep.common.data.datasets import *;"
        "config = DataConfig(dataset='mnist', data_dir=Path(sys.argv[1])); prepare(config);"
        "print(len(load(config).train))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [process.communicate()[0] for process in processes] == ["50\n"] * 4
    check_samples(DataConfig(dataset="mnist", data_dir=tmp_path))
    assert [path.name for path in tmp_path.rglob(".*")] == [".lock"]


def test_own_files_in_place_of_earlier_ones(tmp_path, vouch):
    config = local_files(tmp_path, vouch)
    prepare(config)
    other = np.arange(50, dtype=np.uint8)[::-1] % 10
    prepare(local_files(tmp_path, vouch, **{TRAIN_LABELS: idx(other)}))
    np.testing.assert_array_equal(load(config).train.targets, other)


def with_dimension(body: bytes, num_images: int) -> bytes:
    content = gzip.decompress(body)
    return gzip.compress(content[:4] + struct.pack(">I", num_images) + content[8:])


BAD_FILES = {
    "cut short": (TRAIN_IMAGES, FILES[TRAIN_IMAGES][:-1000], "damaged or cut short"),
    "cut in the header": (TRAIN_IMAGES, FILES[TRAIN_IMAGES][:5], "damaged or cut short"),
    "empty": (TRAIN_LABELS, b"", "cut short: a header of 8 bytes has 0"),
    "not gzip": (TRAIN_LABELS, b"label" * 100, "damaged or cut short"),
    "changed": (
        TEST_IMAGES,
        FILES[TEST_IMAGES][:2000] + b"changed" + FILES[TEST_IMAGES][2007:],
        "damaged or cut short",
    ),
    "magic number": (
        TRAIN_IMAGES,
        idx(ARRAYS[TRAIN_IMAGES], magic=b"\0\0\x0d\3"),
        "expected magic number 0x00000803 in .*, received 0x00000d03",
    ),
    "labels for images": (
        TEST_IMAGES,
        FILES[TEST_LABELS],
        "expected magic number 0x00000803 in .*, received 0x00000801",
    ),
    "fewer than said": (
        TRAIN_IMAGES,
        with_dimension(FILES[TRAIN_IMAGES], 51),
        r"expected 39984 bytes for shape \[51, 28, 28\] in .*, received 39200",
    ),
    "more than said": (
        TRAIN_IMAGES,
        with_dimension(FILES[TRAIN_IMAGES], 49),
        "expected 38416 bytes .* received more",
    ),
    "size": (
        TRAIN_IMAGES,
        idx(np.zeros((50, 32, 30), np.uint8)),
        "expected images of 28x28 pixels in .*, received 32x30",
    ),
    "label": (TEST_LABELS, idx(np.full(20, 10, np.uint8)), "expected labels 0 to 9 in .*, received 10"),
    "count": (
        TRAIN_LABELS,
        idx(np.zeros(49, np.uint8)),
        "expected as many labels in .* as .* has images, 50, received 49",
    ),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_one_clear_line(tmp_path, vouch, kind):
    name, body, reason = BAD_FILES[kind]
    config = local_files(tmp_path, vouch, **{name: body})
    with pytest.raises(UserError, match=reason) as caught:
        prepare(config)
    assert name in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("; put the right file there and write SHA256SUMS again")
    with pytest.raises(UserError, match="is missing on this host"):
        load(config)


def test_a_full_disk_while_unpacking_leaves_nothing_that_is_used(tmp_path, vouch):
    """A limit on file size stands in for a full disk; the images, 39,200 bytes, do not fit."""
    config = local_files(tmp_path, vouch)
    program = (
        "import resource, sys; from pathlib import Path; from allstep.common.data.datasets import *\n"
        "from allstep.common.base.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: prepare(DataConfig(dataset='mnist', data_dir=Path(sys.argv[1])))\n"
        "except UserError as error: print(error)"
    )
    output = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True).stdout
    assert f"received {tmp_path}: File too large; fix that or choose another --dataset or --data-dir\n" in output
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(UserError, match="is missing on this host"):
        load(config)


def test_no_images_at_all(tmp_path, vouch):
    empty = {TEST_IMAGES: idx(np.zeros((0, 28, 28), np.uint8)), TEST_LABELS: idx(np.zeros(0, np.uint8))}
    with pytest.raises(UserError, match="expected at least one label"):
        prepare(local_files(tmp_path, vouch, **empty))


def test_a_file_that_cannot_be_read(tmp_path, vouch):
    config = local_files(tmp_path, vouch)
    os.unlink(tmp_path / "mnist" / TRAIN_LABELS)
    os.mkdir(tmp_path / "mnist" / TRAIN_LABELS)
    with pytest.raises(UserError, match="expected a regular file, received a directory"):
        prepare(config)


def empty_file_for(num_images: int) -> bytes:
    """Return a file whose header claims `num_images` images, and that has none."""
    return gzip.compress(struct.pack(">4I", 0x0803, num_images, 28, 28))


BOMBS = {
    "goes on after its images": zeros_after(gzip.decompress(FILES[TRAIN_IMAGES]), 2**26),
    "says more than there can be": empty_file_for(2**32 - 1),
    "goes on in another part": FILES[TRAIN_IMAGES] + zeros_after(b"", 2**26),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_takes_no_more_than_its_header_says(tmp_path, vouch, kind):
    config = local_files(tmp_path, vouch, **{TRAIN_IMAGES: BOMBS[kind]})
    tracemalloc.start()
    with pytest.raises(UserError, match="expected .* received (more|3367254359280)"):
        prepare(config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_content_larger_than_memory_is_not_read(tmp_path, vouch, monkeypatch):
    monkeypatch.setattr("allstep.common.files.disk.available_memory", lambda: 2**26)
    config = local_files(tmp_path, vouch, **{TRAIN_IMAGES: empty_file_for(10**5)})
    with pytest.raises(UserError, match="expected at most 67108864 bytes, the memory that is left, received 235200000"):
        prepare(config)


@pytest.mark.parametrize("name", [TRAIN_IMAGES, "SHA256SUMS", "unpacked-*/train_images.npy", "unpacked-*/SHA256SUMS"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, vouch, name, kind):
    config = local_files(tmp_path, vouch)
    prepare(config)
    [path] = (tmp_path / "mnist").glob(name)
    path.unlink()
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"received .*{path.name}: expected a regular file, received a "):
        prepare(config)


FORGED = {
    "labels above": ("train_labels", np.full(50, 10), "expected 50 labels from 0 to 9 .*, received 50 from 10 to 10"),
    "labels below": ("train_labels", np.full(50, -1), "expected 50 labels from 0 to 9 .*, received 50 from -1 to -1"),
    "fewer labels": ("validation_labels", np.zeros(19, np.int64), "expected 20 labels .*, received 19"),
    "float labels": ("train_labels", np.zeros(50), r"expected int64 numbers of shape \('n',\)"),
    "float images": ("train_images", np.zeros((50, 28, 28, 1)), r"expected uint8 numbers of shape \('n', 28, 28, 1\)"),
    "objects": ("train_images", np.array([None] * 50), "expected uint8 numbers of shape"),
    "no images": ("train_images", np.zeros((0, 28, 28, 1), np.uint8), "expected uint8 numbers of shape"),
    "other images": ("train_images", np.zeros((50, 28, 14, 2), np.uint8), "expected uint8 numbers of shape"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_arrays_with_right_checksums(tmp_path, vouch, kind):
    """Oracle: the output of `_write`; a batch of anything else would train on other data than the data set's."""
    name, array, reason = FORGED[kind]
    config = local_files(tmp_path, vouch)
    prepare(config)
    [target] = (tmp_path / "mnist").glob("unpacked-*")
    np.save(target / f"{name}.npy", array)
    vouch(target)
    with pytest.raises(UserError, match=reason) as caught:
        load(config)
    assert "\n" not in str(caught.value)


SHAPES = st.tuples(st.integers(0, 60), st.sampled_from([28, 28, 0, 2**31]), st.sampled_from([28, 28, 1]))
IDX = st.builds(
    lambda magic, shape, content: magic + struct.pack(">3I", *shape) + content,
    st.sampled_from([b"\0\0\x08\3", b"\0\0\x08\1", b"\0\0\x0d\3"]) | st.binary(max_size=4),
    SHAPES,
    st.binary(max_size=100) | st.just(bytes(784)),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    IDX.map(gzip.compress)
    | st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda data: FILES[TRAIN_LABELS][:10] + data)
)
def test_any_bytes_are_images_or_a_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "file.gz"
    path.write_bytes(data)
    with contextlib.suppress(UserError):
        images = mnist.read_idx(path, item_shape=(28, 28))
        assert images.shape[1:] == (28, 28) and images.nbytes + 16 == len(gzip.decompress(data))
