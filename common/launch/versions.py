"""Versions of the frameworks: those that are tested, and those for which the installed Horovod was compiled."""

import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import UserError, note, warn
from allstep.common.launch.placement import Placement, apparent_rank

TESTED = {"torch": ((2, 9), (2, 14)), "tensorflow": ((2, 19), (2, 21))}
"""Oldest and newest tested version (major, minor) of each framework."""


def check_version(package: str, version: str) -> None:
    """Refuse a framework that is older than the tested versions, and warn of a newer one in rank 0."""
    oldest, newest = TESTED[package]
    first, last = (".".join(map(str, numbers)) for numbers in (oldest, newest))
    found = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if found < oldest:
        raise UserError(f"expected {package} {first} to {last}, received {version}; install one of these")
    if found > newest and apparent_rank() == 0:
        warn(f"{package} {version} is newer than the tested versions, {first} to {last}")


_FEATURES = {"mpi_built": "MPI", "gloo_built": "Gloo", "nccl_built": "NCCL"}


@dataclass(frozen=True)
class HorovodBuild:
    """Metadata of a Horovod build."""

    versions: dict[str, str]
    """Versions that it was compiled for, by framework: pytorch, tensorflow."""
    features: tuple[str, ...]
    """Communication libraries in the build, among MPI, Gloo and NCCL."""
    patches: tuple[str, ...] = ()
    """Patches of allstep in it; none in a Horovod of another source."""
    built_for: dict[str, str] = field(default_factory=dict)
    """Distributions that it needs in exactly one version."""


def read_build() -> HorovodBuild | None:
    """Return the metadata of the installed Horovod without importing it, or None if it is not installed."""
    found = importlib.util.find_spec("horovod")
    if found is None or found.origin is None:
        return None
    record = Path(found.origin).with_name("metadata.json")
    built = json.loads(record.read_text()) if record.exists() else {}
    versions = {name: built[name] for name in ("pytorch", "tensorflow") if name in built}
    features = tuple(name for key, name in _FEATURES.items() if built.get(key))
    ours = built.get("allstep", {})
    return HorovodBuild(versions, features, tuple(ours.get("patches", ())), ours.get("built_for", {}))


def check_built_for(framework: str, version: str) -> None:
    """Refuse a Horovod that is missing or was compiled for another version of a framework; using it would fail.

    `framework` is pytorch or tensorflow, `version` that of the installed one.
    """
    build = read_build()
    if build is None:
        raise UserError(f"expected Horovod, received an environment without it; run {setup_command()}")
    built_for = build.versions.get(framework)
    if built_for != version:
        received = f"one built for {built_for}" if built_for else "one built without it"
        raise UserError(f"expected Horovod built for {framework} {version}, received {received}; run {setup_command()}")


def usable_gpus(num_gpus: int, wanted: str, placement: Placement) -> int:
    """Return how many of a rank's visible GPUs Horovod can use: all, or none if it was built for CPUs.

    A Horovod built for CPUs accepts tensors on a GPU, and then aborts the process when the sum is ready. `wanted` is
    auto, cpu or cuda. Raises UserError if it is cuda, and Horovod was built for CPUs.
    """
    build = read_build()
    if not num_gpus or wanted == "cpu" or build is None or "NCCL" in build.features:
        return num_gpus
    if wanted == "cuda":
        raise UserError(
            "expected Horovod with NCCL for --device cuda, received one built for CPUs; run "
            f"{setup_command(gpu=True)}, or give --device cpu or another --strategy"
        )
    if placement.rank == 0:
        note(f"training on the CPU: Horovod is built for CPUs here; {setup_command(gpu=True)} builds it for GPUs")
    return 0
