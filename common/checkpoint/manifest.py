"""JSON manifest of a checkpoint: its files, the progress of training, and a checksum over everything."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Annotated, Any, ClassVar

from allstep.common.base.errors import UserError
from allstep.common.checkpoint.state import FILES, OPTIONAL_FILES, Progress
from allstep.common.files import strict_json
from allstep.common.files.strict_json import Count, Mismatch, Whole, brief, from_json, matching, one_of, text

FORMAT_VERSION = 3
MAX_BYTES = 2**26  # names of classes may be long; damaged or hostile ones must not fill the memory


def _time(value: Any, where: str) -> None:
    text(value, where)
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise Mismatch(f"expected {where} to be a time as ISO 8601 has it, received {brief(value)}") from None


def _metric(value: Any, where: str) -> None:
    if not isinstance(value, float):  # nan and infinities are kept, but never count as best
        raise Mismatch(f"expected {where} to be a float or null, received {brief(value)}")


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file of the checkpoint."""

    CLOSED: ClassVar[bool] = True

    size: Whole  # bytes
    sha256: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits")]


@dataclass(frozen=True)
class _Version:
    format_version: Count


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint except its arrays."""

    CLOSED: ClassVar[bool] = True

    sequence: Whole  # order of writing within an output directory; the highest is the latest
    created: Annotated[str, _time]  # UTC, ISO 8601
    metric: Annotated[float, _metric] | None  # of validation: accuracy or minus mae; None if not measured
    framework: Annotated[str, one_of("pytorch", "tensorflow")]
    progress: Progress
    # `common.training` checks the content of these, and of the description.
    rng: dict[str, Any]
    schedule: dict[str, Any]
    config: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    data: dict[str, str] = field(default_factory=dict)  # since format 2
    description: dict[str, Any] = field(default_factory=dict)  # since format 3

    @property
    def has_metric(self) -> bool:
        """Whether the metric can be compared, because it was measured and is finite."""
        return self.metric is not None and math.isfinite(self.metric)


class NewerFormat(UserError):
    """Error for a checkpoint that a later version of allstep wrote."""


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with the format version and a checksum over all other content.

    Raises TypeError if JSON cannot hold a value or a key.
    """
    content = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    content["checksum"] = _checksum(content)
    return json.dumps(_finite(content), indent=1, allow_nan=False).encode()


def copied(manifest: Manifest) -> Manifest:
    """Return a copy that shares nothing with `manifest`, as `encode` and `decode` make it; raises as `encode` does."""
    # Checksum, indentation and copies by dataclasses would make training wait several times as long.
    content = _finite({**vars(manifest), "progress": vars(manifest.progress)})
    return from_json(Manifest, _restored(json.loads(json.dumps(content))), "manifest")


def decode(data: bytes) -> Manifest:
    """Return the manifest in `data`, the output of `encode`, which may be damaged or hostile.

    Raises NewerFormat if the format version is above `FORMAT_VERSION`, NotJson or Mismatch if anything else is wrong.
    """
    content = _restored(strict_json.loads(data))
    # Checked before the checksum, which a later format may compute differently.
    version = from_json(_Version, content, "manifest").format_version
    if version > FORMAT_VERSION:
        raise NewerFormat(f"has format {version}, this allstep reads up to {FORMAT_VERSION}: update allstep")
    if content.pop("checksum", None) != _checksum(content):
        raise Mismatch("its content does not match its checksum")
    del content["format_version"]
    # The checksum only guards against accidents; a forged manifest must also give a clear error.
    manifest = from_json(Manifest, content, "manifest")
    files = {file_name(group): group in OPTIONAL_FILES for group in FILES}
    for name, optional in files.items():
        if not optional and name not in manifest.files:
            raise Mismatch(f"expected manifest.files to have {name}, received {brief(sorted(manifest.files))} alone")
    if more := manifest.files.keys() - files.keys():
        raise Mismatch(f"expected manifest.files to have {', '.join(files)}, received {brief(min(more))} besides")
    return manifest


def file_name(group: str) -> str:
    """Return the name of the checkpoint's file of that group, or of the constants."""
    return f"{group}.safetensors"


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(_finite(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _finite(value: Any) -> Any:
    """Return `value` with each non-finite float, which JSON lacks, as an object such as {"non_finite": "nan"}."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"expected str keys, which JSON gives back as they are, received {list(value)}")
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {strict_json.NON_FINITE: repr(float(value))}
    return value


def _restored(value: Any) -> Any:
    """Return the inverse of `_finite`; objects that `_finite` never makes stay the same."""
    if isinstance(value, dict):
        if value.keys() == {strict_json.NON_FINITE} and value[strict_json.NON_FINITE] in ("nan", "inf", "-inf"):
            return float(value[strict_json.NON_FINITE])
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value
