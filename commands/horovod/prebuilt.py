"""Wheels of Horovod that others have built: a folder or URL in ALLSTEP_HOROVOD_WHEELS, with a file SHA256SUMS.

A wheel fits only if its name, which has all versions and a hash of the patches and options, is the one that would be
built, and if its SHA-256 is the one in SHA256SUMS. Otherwise Horovod is built as if the variable were not set.
"""

from __future__ import annotations

import http.client
import os
import urllib.parse
import urllib.request
from pathlib import Path

from allstep.common.files.disk import sha256_of

VARIABLE = "ALLSTEP_HOROVOD_WHEELS"
SUMS = "SHA256SUMS"
_TIMEOUT_S = 30


def fitting(name: str, folder: Path) -> Path | None:
    """Return the path of the wheel `name`, or None if there is none that fits.

    Args:
        folder: where a wheel from a URL is kept.
    """
    source = os.environ.get(VARIABLE)
    if not source:
        return None
    try:
        expected = read_sums(_read(source, SUMS).decode()).get(name)
        kept = (folder if _is_url(source) else Path(source)) / name
        if expected and _is_url(source) and not (kept.exists() and sha256_of(kept) == expected):
            _keep(kept, _read(source, name))
        received = sha256_of(kept) if expected else None
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"  no wheel from {VARIABLE}: {error}", flush=True)
        return None
    if expected is None:
        print(f"  no wheel from {VARIABLE}: {source} has no {name}", flush=True)
        return None
    if received != expected:
        print(f"  no wheel from {VARIABLE}: the SHA-256 of {name} is not that of {SUMS}", flush=True)
        return None
    print(f"  from {VARIABLE}: {name}", flush=True)
    return kept


def _keep(path: Path, data: bytes) -> None:
    """Replace a file that another process may be reading or writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


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


def _is_url(source: str) -> bool:
    return urllib.parse.urlsplit(source).scheme in ("http", "https", "file")


def _read(source: str, name: str) -> bytes:
    if not _is_url(source):
        return Path(source, name).read_bytes()
    url = f"{source.rstrip('/')}/{urllib.parse.quote(name)}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return answer.read()
