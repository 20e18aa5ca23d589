"""Where a job writes: the folder that it is started in, temporary files, data sets; whether there is room."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, size, warning

# A rank's sockets and logs need little; a checkpoint of ResNet-50 with its momentum has 200 MB.
FULL_BYTES = 100_000_000
LOW_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Folder:
    """A place to write to."""

    path: str
    free_bytes: int
    free_files: int | None
    """None where the file system does not count them."""
    writable: bool


def read(data_dir: Path) -> tuple[Folder, ...]:
    """The working directory, that of temporary files and that of data sets, or where it would be made."""
    return tuple(_read_folder(path) for path in (Path.cwd(), Path(tempfile.gettempdir()), data_dir))


def _read_folder(path: Path) -> Folder:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    left = os.statvfs(there)
    return Folder(
        path=str(path),
        free_bytes=left.f_bavail * left.f_frsize,
        free_files=left.f_favail if left.f_files else None,
        writable=os.access(there, os.W_OK),
    )


def check(facts: tuple[Folder, ...]) -> list[Finding]:
    """A line for each place that lacks something, or one for all."""
    findings = []
    for folder in facts:
        free = f"{size(folder.free_bytes)} free in {folder.path}"
        if not folder.writable:
            findings.append(fault("disk", f"{folder.path} cannot be written", "change its owner or its mode"))
        elif folder.free_bytes < FULL_BYTES:
            findings.append(fault("disk", f"{free}: it is full", "remove what nobody needs there"))
        elif folder.free_files == 0:
            findings.append(fault("disk", f"no file more fits in {folder.path}", "remove files there"))
        elif folder.free_bytes < LOW_BYTES:
            findings.append(warning("disk", free, "make room for checkpoints and data sets"))
    return findings or [ok("disk", ", ".join(f"{size(folder.free_bytes)} free in {folder.path}" for folder in facts))]
