"""The JSON manifest of a checkpoint: what its files are, where training stood, and a checksum over it all."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.state import FRAMEWORKS, GROUPS, OPTIONAL_GROUPS, Progress
from allstep.common.files import strict_json
from allstep.common.files.schema import (
    Mismatch,
    brief,
    closed,
    mapping,
    mapping_of,
    nullable,
    one_of,
    record,
    text,
    whole,
)

FORMAT_VERSION = 1
MAX_BYTES = 2**20  # a real one has a few kilobytes; a damaged or hostile one must not fill the memory


@dataclass(frozen=True)
class FileRecord:
    """What a file of the checkpoint must be."""

    size: int  # bytes
    sha256: str  # hexadecimal


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its arrays."""

    sequence: int  # order of writing within one output directory: the highest is the latest
    created: str  # UTC, ISO 8601
    metric: float | None  # of validation: accuracy or minus mae, higher is better; None where it was not measured
    framework: str
    progress: Progress
    rng: dict[str, Any]
    schedule: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileRecord]

    @property
    def has_metric(self) -> bool:
        """Whether the metric can be compared: it was measured and is finite."""
        return self.metric is not None and math.isfinite(self.metric)


class NewerFormat(UserError):
    """The checkpoint was written by a later allstep."""


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, with the format version and a checksum over everything else in it.

    Raises:
        TypeError: a value or a key is nothing that JSON can hold.
    """
    content = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    content["checksum"] = _checksum(content)
    return json.dumps(_finite(content), indent=1, allow_nan=False).encode()


def copied(manifest: Manifest) -> Manifest:
    """A copy that shares nothing with `manifest`, as `encode` and `decode` would make it.

    Raises:
        TypeError: a value or a key is nothing that JSON can hold.
    """
    # Without checksum, indentation and dataclasses' own copies, on which training would wait several times as long.
    content = _finite({**vars(manifest), "progress": vars(manifest.progress)})
    return _manifest_of(_restored(json.loads(json.dumps(content))))


def decode(data: bytes) -> Manifest:
    """The manifest that `encode` made into `data`, which may be damaged or hostile.

    Raises:
        NewerFormat: the format version is above ours.
        NotJson, Mismatch: anything else is wrong; the message says what.
    """
    content = _restored(strict_json.loads(data))
    # Before the checksum: a later format may compute it in another way.
    record(format_version=whole(1))(content, "manifest")
    if content["format_version"] > FORMAT_VERSION:
        version = content["format_version"]
        raise NewerFormat(f"has format {version}, this allstep reads up to {FORMAT_VERSION}: update allstep")
    if content.pop("checksum", None) != _checksum(content):
        raise Mismatch("its content does not match its checksum")
    del content["format_version"]
    # The checksum guards against accidents only: whoever forged it right must still get a clear line.
    _check(content, "manifest")
    return _manifest_of(content)


def file_name(group: str) -> str:
    """The file of a checkpoint that holds the arrays of `group`."""
    return f"{group}.safetensors"


def _check_time(value: Any, where: str) -> None:
    text(value, where)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise Mismatch(f"expected {where} to be a time as ISO 8601 has it, received {brief(value)}") from None


def _check_metric(value: Any, where: str) -> None:
    if not isinstance(value, float):  # nan and infinities are kept, and never best
        raise Mismatch(f"expected {where} to be a float or null, received {brief(value)}")


def _check_sha256(value: Any, where: str) -> None:
    text(value, where)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise Mismatch(f"expected {where} to be 64 hexadecimal digits, received {brief(value)}")


def _check_running(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Mismatch(f"expected {where} to be a number, received {brief(value)}")


_COUNTS = {name: whole() for name in ("epoch", "offset", "step", "samples_seen")}
_FILE = closed(record(size=whole(), sha256=_check_sha256), "size", "sha256")
_FILES = {file_name(group): _FILE for group in GROUPS if group not in OPTIONAL_GROUPS}
_OPTIONAL_FILES = {file_name(group): _FILE for group in OPTIONAL_GROUPS}
_check = closed(
    record(
        sequence=whole(),
        created=_check_time,
        metric=nullable(_check_metric),
        framework=one_of(*FRAMEWORKS),
        progress=closed(record(**_COUNTS, running=mapping_of(_check_running)), *_COUNTS, "running"),
        # What these must hold is for the run to say that goes on: see `allstep.common.training.resuming`.
        rng=mapping,
        schedule=mapping,
        config=mapping,
        versions=mapping_of(text),
        files=closed(record(_OPTIONAL_FILES, **_FILES), *_FILES, *_OPTIONAL_FILES),
    ),
    *(item.name for item in fields(Manifest)),
)


def _manifest_of(content: dict[str, Any]) -> Manifest:
    files = {name: FileRecord(**entry) for name, entry in content["files"].items()}
    return Manifest(**{**content, "progress": Progress(**content["progress"]), "files": files})


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(_finite(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _finite(value: Any) -> Any:
    """`value` with each non-finite float, which JSON has no word for, as {"non_finite": "nan"}."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"expected str keys, which JSON gives back as they are, received {list(value)}")
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"non_finite": repr(float(value))}
    return value


def _restored(value: Any) -> Any:
    """What `_finite` was made of; of a pair that it never makes, the same."""
    if isinstance(value, dict):
        if value.keys() == {"non_finite"} and value["non_finite"] in ("nan", "inf", "-inf"):
            return float(value["non_finite"])
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
