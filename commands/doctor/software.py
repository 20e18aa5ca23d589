"""Software of a host: whether frameworks and Horovod fit, and what must be the same on all hosts, with data sets.

This process imports neither framework: each is imported by its own process (`installation.py` in its folder).
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import allstep.common
from allstep.commands.doctor.finding import Finding, fault, ok, warning
from allstep.commands.shared.machine import run_output
from allstep.common.base.checkout import extra_command, setup_command
from allstep.common.catalog.strategies import TITLES
from allstep.common.files import strict_json
from allstep.common.files.disk import sha256_of
from allstep.common.files.strict_json import from_json
from allstep.common.launch.versions import HorovodBuild, read_build
from allstep.common.process.installation import Installation
from allstep.common.process.requirements import FRAMEWORK_PACKAGES

_SECONDS = 60
_NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Frameworks:
    """Installed frameworks, by the names `pytorch` and `tensorflow`."""

    installed: dict[str, Installation]
    errors: dict[str, str]
    """Import error of each framework that cannot be imported, in one line."""
    horovod: HorovodBuild | None


def read_frameworks() -> Frameworks:
    """Import both frameworks at once, each in its own process."""
    with ThreadPoolExecutor() as pool:
        answers = dict(zip(TITLES, pool.map(_ask, TITLES), strict=True))
    return Frameworks(
        installed={name: answer for name, answer in answers.items() if isinstance(answer, Installation)},
        errors={name: answer for name, answer in answers.items() if isinstance(answer, str)},
        horovod=read_build(),
    )


def _ask(framework: str) -> Installation | str:
    if importlib.util.find_spec(FRAMEWORK_PACKAGES[framework]) is None:
        return _NOT_INSTALLED
    command = [sys.executable, "-m", f"allstep.{framework}.installation"]
    try:
        result = subprocess.run(command, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"its import takes longer than {_SECONDS} s"
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its import ended with status {result.returncode}"
    return from_json(Installation, strict_json.loads(result.stdout.splitlines()[-1]), framework)


def check_frameworks(facts: Frameworks) -> list[Finding]:
    """Return a finding for each framework, and one for Horovod's features."""
    found = [_check_one(name, facts) for name in TITLES]
    if facts.horovod is None:
        return [*found, warning("horovod", "not installed; other strategies need none", f"run {setup_command()}")]
    features = ", ".join(facts.horovod.features)
    num_gpus = max((one.num_gpus for one in facts.installed.values()), default=0)
    if num_gpus and "NCCL" not in facts.horovod.features:
        fix = f"run {setup_command(gpu=True)}"
        found.append(warning("horovod", f"built with {features}, without NCCL for the GPUs", fix))
    else:
        found.append(ok("horovod", f"built with {features}"))
    return found


def _check_one(name: str, facts: Frameworks) -> Finding:
    if facts.errors.get(name) == _NOT_INSTALLED:
        # A user may want one framework alone.
        level = warning if facts.installed else fault
        return level(name, f"{TITLES[name]} is not installed", f"run {extra_command(name)}")
    if name in facts.errors:
        return fault(name, f"cannot be imported: {facts.errors[name]}", f"run {extra_command(name)}")
    one = facts.installed[name]
    built_for = facts.horovod.versions.get(name) if facts.horovod else None
    if facts.horovod and built_for != one.version:
        received = f"was built for {built_for}" if built_for else "was built without it"
        return fault(name, f"{TITLES[name]} {one.version}, but Horovod {received}", f"run {setup_command()}")
    if one.horovod_error and facts.horovod:
        return fault(name, f"Horovod cannot be imported for it: {one.horovod_error}", f"run {setup_command()}")
    built = f"for CUDA {one.cuda}" if one.cuda else "for CPUs"
    return ok(name, f"{TITLES[name]} {one.version} {built}{', and Horovod built for it' if facts.horovod else ''}")


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
    """Commit of the checkout; None if it cannot be read_software."""
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
