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

from allstep.common.files.disk import sha256_of, write_atomically

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
