"""Checks the free space where a job writes: in the working directory, the temporary folder and the data folder."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, size, warning

# Sockets and logs of a rank need little; a checkpoint of ResNet-50 with its momentum takes 200 MB.
FULL_BYTES = 100_000_000
LOW_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Folder:
    """Folder to which a job writes."""

    path: str
    free_bytes: int
    free_files: int | None
    """Number of files that can still be created; None if the file system has no such limit."""
    writable: bool


def read(data_dir: Path) -> tuple[Folder, ...]:
    """Read the state of working directory, temporary folder and data folder, or of their closest existing parent."""
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
    """Return one finding for each folder with a problem, or one for all folders."""
    findings = []
    for folder in facts:
        free = f"{size(folder.free_bytes)} free in {folder.path}"
        if not folder.writable:
            findings.append(fault("disk", f"{folder.path} cannot be written", "change its owner or its mode"))
        elif folder.free_bytes < FULL_BYTES:
            findings.append(fault("disk", f"{free}: it is full", "remove files that are no longer needed"))
        elif folder.free_files == 0:
            findings.append(fault("disk", f"no file more fits in {folder.path}", "remove files there"))
        elif folder.free_bytes < LOW_BYTES:
            findings.append(warning("disk", free, "make room for checkpoints and data sets"))
    return findings or [ok("disk", ", ".join(f"{size(folder.free_bytes)} free in {folder.path}" for folder in facts))]
