"""The JSON manifest of a checkpoint: what its files are, where training stood, and a checksum over it all."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from allstep.common.checkpoint.state import Progress
from allstep.common.errors import UserError

FORMAT_VERSION = 1
MAX_BYTES = 16 * 2**20  # a real one has tens of kilobytes; a damaged or hostile one must not fill the memory


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
    metric: float | None  # validation accuracy, higher is better; None where it was not measured
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
    return _manifest_of(json.loads(json.dumps(content), object_hook=_restore_non_finite))


def decode(data: bytes) -> Manifest:
    """The manifest that `encode` made into `data`, which may be damaged or hostile.

    Raises:
        NewerFormat: the format version is above ours.
        ValueError, RecursionError: anything else is wrong; the message says what.
    """
    content = json.loads(data, object_hook=_restore_non_finite)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    # Before the checksum: a later format may compute it in another way.
    version = content.get("format_version")
    if not isinstance(version, int):
        raise ValueError("no format version")
    if version > FORMAT_VERSION:
        raise NewerFormat(f"has format {version}, this allstep reads up to {FORMAT_VERSION}: update allstep")
    if content.pop("checksum", None) != _checksum(content):
        raise ValueError("its content does not match its checksum")
    del content["format_version"]
    return _manifest_of(content)


def _manifest_of(content: dict[str, Any]) -> Manifest:
    # The checksum guards against accidents only: whoever forged it right must still get a clear line.
    kinds = {"int": int, "str": str, "float | None": (float, type(None))}
    if set(content) != {item.name for item in fields(Manifest)}:
        raise ValueError("its entries are not those of format 1")
    for item in fields(Manifest):
        if not isinstance(content[item.name], kinds.get(item.type, dict)):
            raise ValueError(f"{item.name} is no {item.type}")
    try:
        content["progress"] = Progress(**content["progress"])
        content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    except TypeError as error:
        raise ValueError(str(error)) from None
    progress = content["progress"]
    counts = [progress.epoch, progress.offset, progress.step, progress.samples_seen]
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError("progress holds something that is no count")
    if not isinstance(progress.running, dict):
        raise ValueError("progress holds no running numbers")
    return Manifest(**content)


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


def _restore_non_finite(value: dict[str, Any]) -> Any:
    if value.keys() == {"non_finite"} and isinstance(value["non_finite"], str):
        return float(value["non_finite"])
    return value
