"""Damaged, hostile and invalid files of data sets. Flags about data: test_flags.py.

Oracle: the contract of mistakes, in `mistake.check`. Parsers with arbitrary bytes: tests/common/data/datasets.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hostile_files import endless, idx, png_of, sparse, zeros_after
from mistake import PYTORCH, TENSORFLOW, Mistake, check
from PIL import Image

IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz"
ARCHIVE = "cifar10/cifar-10-binary.tar.gz"
FLAGS = "--model mlp --epochs 1 --data-dir {here}"
# No server listens at this mirror, so nothing is downloaded.
MNIST = f"{PYTORCH} {FLAGS} --dataset mnist --mirror http://127.0.0.1:9"
CIFAR = f"{PYTORCH} {FLAGS} --dataset cifar10 --mirror http://127.0.0.1:9"
FOLDER = f"{PYTORCH} {FLAGS} --dataset image-folder --image-size 16"


def vouch(directory: Path) -> None:
    """Write SHA256SUMS as sha256sum would, except for files that cannot be read to their end."""
    sums = ""
    for path in sorted(directory.iterdir()):
        readable = path.is_file() and path.stat().st_size < 2**30
        sums += f"{hashlib.sha256(path.read_bytes()).hexdigest() if readable else '0' * 64}  {path.name}\n"
    (directory / "SHA256SUMS").write_text(sums)


def mnist(name: str, make: Callable[[Path], object] | bytes) -> Callable[[Path], None]:
    """Return a function that writes small user files for MNIST, and replaces one of them."""

    def prepare(folder: Path) -> None:
        (folder / "mnist").mkdir()
        (folder / "mnist" / ".lock").touch()  # it stays, and has no meaning by itself
        for part, count in (("train", 50), ("t10k", 20)):
            images = folder / f"mnist/{part}-images-idx3-ubyte.gz"
            images.write_bytes(idx(np.zeros((count, 28, 28), np.uint8)))
            images.with_name(f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(count, np.uint8)))
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(make, bytes):
            path.write_bytes(make)
        else:
            make(path)
        if path.name != "SHA256SUMS":
            vouch(path.parent)

    return prepare


def cifar(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def prepare(folder: Path) -> None:
        (folder / ARCHIVE).parent.mkdir()
        (folder / ARCHIVE).with_name(".lock").touch()  # it stays, and has no meaning by itself
        make(folder / ARCHIVE)
        vouch((folder / ARCHIVE).parent)

    return prepare


def batch_of(content: bytes) -> Callable[[Path], object]:
    """Return a function that writes an archive with one batch."""

    def make(path: Path) -> None:
        batch = path.with_name("data_batch_1.bin")
        batch.write_bytes(content)
        with tarfile.open(path, "w:gz") as archive:
            archive.add(batch, "cifar-10-batches-bin/data_batch_1.bin")
        batch.unlink()

    return make


def images(name: str, make: Callable[[Path], object] | bytes | None) -> Callable[[Path], None]:
    """Return a function that writes an image folder of two classes, and replaces or removes (None) one file."""

    def prepare(folder: Path) -> None:
        for split in ("train", "val"):
            for kind in ("cat", "dog"):
                (folder / split / kind).mkdir(parents=True)
                for number in range(2):
                    Image.new("RGB", (20, 20)).save(folder / split / kind / f"{number}.png")
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(make, bytes):
            path.write_bytes(make)
        elif make:
            make(path)

    return prepare


def bomb(path: Path) -> None:
    """Write zeros after the images that the header announces."""
    path.write_bytes(zeros_after(struct.pack(">4I", 0x0803, 50, 28, 28), 2**30))


def archive_bomb(path: Path) -> None:
    """Write zeros under a name that no reader asks for."""
    info = tarfile.TarInfo("zeros")
    info.size = 2**33 - 1
    path.write_bytes(zeros_after(info.tobuf(), 600 * 2**20))


REGULAR = "files of the data set that can be used"
MISTAKES = {
    # mnist
    "images a FIFO": Mistake(MNIST, REGULAR, "a FIFO", prepare=mnist(IMAGES, os.mkfifo)),
    "images a FIFO, TensorFlow": Mistake(
        MNIST.replace(PYTORCH, TENSORFLOW), REGULAR, "a FIFO", prepare=mnist(IMAGES, os.mkfifo)
    ),
    "sums endless": Mistake(MNIST, REGULAR, "a character device", prepare=mnist("mnist/SHA256SUMS", endless)),
    "images missing": Mistake(MNIST, f"{IMAGES}, which", "none", prepare=lambda here: none_of(here, IMAGES)),
    "images a bomb": Mistake(MNIST, "39200 bytes for shape [50, 28, 28]", "more", prepare=mnist(IMAGES, bomb)),
    "images cut": Mistake(
        MNIST, "to be whole", "cut short", prepare=mnist(IMAGES, idx(np.zeros((50, 28, 28), np.uint8))[:-9])
    ),
    "data directory a file": Mistake(
        MNIST.replace("{here}", "{here}/x"), REGULAR, "Not a directory", prepare=lambda here: (here / "x").touch()
    ),
    # cifar10
    "archive a bomb": Mistake(CIFAR, "at most 600000000 bytes of content", "more", prepare=cifar(archive_bomb)),
    "archive without batches": Mistake(
        CIFAR, "a file cifar-10-batches-bin/data_batch_2.bin", "none", prepare=cifar(batch_of(bytes(3073)))
    ),
    # image-folder
    "an image of 40 GB": Mistake(FOLDER, "an image", "40000000000 bytes", prepare=images("train/cat/2.png", sparse)),
    "an image cut": Mistake(FOLDER, "an image", "truncated", prepare=images("train/cat/2.png", png_of(1000, 1000))),
    "an image under a hostile name": Mistake(
        FOLDER, "an image", "neither JPEG nor PNG", prepare=images("train/cat/\x1b[2J\n.png", b"meow")
    ),
    "no folders": Mistake(FOLDER, "to hold train/ and val/", "none", prepare=lambda here: (here / "x").touch()),
}


def none_of(folder: Path, name: str) -> None:
    mnist(name, b"")(folder)
    (folder / name).unlink()


@pytest.mark.parametrize("name", MISTAKES)
def test_data_files(name, tmp_path):
    check(MISTAKES[name], tmp_path)
