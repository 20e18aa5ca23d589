"""Hostile files that tests put in the place of valid ones."""

from __future__ import annotations

import gzip
import os
import socket
import struct
import zlib
from pathlib import Path

import numpy as np


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path, size: int = 40 * 10**9) -> None:
    """Write zeros that take no space on the disk."""
    path.touch()
    os.truncate(path, size)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        descriptor = os.open(path.parent, os.O_PATH)  # its whole path may be too long for a socket's name
        listener.bind(f"/proc/self/fd/{descriptor}/{path.name}")
        os.close(descriptor)


def zeros_after(start: bytes, num_bytes: int) -> bytes:
    """Return `start` and zeros in gzip's format, with few of the zeros in memory at a time."""
    packer = zlib.compressobj(1, wbits=31)
    packed = [packer.compress(start), *(packer.compress(bytes(2**20)) for _ in range(num_bytes // 2**20))]
    return b"".join([*packed, packer.flush()])


def idx(array: np.ndarray, *, magic: bytes | None = None) -> bytes:
    """Return a gzipped IDX file."""
    header = magic or bytes([0, 0, 8, array.ndim])
    return gzip.compress(header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes(), mtime=0)


def png_of(width: int, height: int) -> bytes:
    """Return the beginning of a PNG file of this size: its first million bytes of pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(2**20)))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
