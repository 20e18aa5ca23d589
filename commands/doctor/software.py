"""Software and data that must be the same on all hosts: Python, packages, the checkout's files, data sets' files."""

import hashlib
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import allstep.common
from allstep.commands.shared.machine import run_output
from allstep.common.files.disk import sha256_of

# Larger data sets are compared only by names and sizes: reading all of ImageNet takes minutes.
READ_BYTES = 2**28
_PARTS = ("common", "pytorch", "tensorflow", "commands")


@dataclass(frozen=True)
class DataSet:
    """Files of a data set."""

    num_files: int
    num_bytes: int
    digest: str
    """Hash of all names and sizes, and of the contents if the data set is small."""


@dataclass(frozen=True)
class Software:
    """Software and data sets on a host."""

    python: str
    packages: dict[str, str]
    """Version by name."""
    commit: str | None
    """Commit of the checkout; None if it cannot be read."""
    sources: dict[str, str]
    """Checksum of each source file, by path."""
    data_sets: dict[str, DataSet]
    """Data sets by the name of their folder."""


def read(data_dir: Path, *, data: bool) -> Software:
    """Read what is installed, and the data sets in `data_dir` (--data-dir) if `data` is true."""
    root = Path(allstep.common.__path__[0]).parent
    found = (path for part in _PARTS for path in sorted((root / part).rglob("*.py")))
    sources = (
        path for path in found if "patches" not in path.parts
    )  # those to Horovod, which a wheel has in an archive
    folders = sorted(filter(Path.is_dir, data_dir.iterdir())) if data and data_dir.is_dir() else []
    return Software(
        python=platform.python_version(),
        packages={one.name: one.version for one in importlib.metadata.distributions()},
        commit=run_output("git", "-C", str(root), "rev-parse", "HEAD"),
        sources={str(path.relative_to(root)): sha256_of(path)[:16] for path in sources},
        data_sets={folder.name: _read_data_set(folder) for folder in folders},
    )


def _read_data_set(folder: Path) -> DataSet:
    files = sorted(
        Path(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if not name.startswith(".") and Path(parent, name).is_file()
    )
    num_bytes = sum(path.stat().st_size for path in files)
    digest = hashlib.sha256()
    for path in files:
        content = sha256_of(path) if num_bytes <= READ_BYTES else ""
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0{content}\0".encode(errors="replace"))
    return DataSet(len(files), num_bytes, digest.hexdigest()[:16])
