"""Create an environment with Horovod 0.28.1 as published, except for the patches it needs to compile:

    .venv/bin/python tools/unmodified_horovod.py DIRECTORY

It is the reference of `python -m allstep.benchmarks.startup --unmodified DIRECTORY/bin/python`.
"""

import sys
import venv
from pathlib import Path

import this_checkout  # noqa: F401  # first: makes allstep.* importable
from setup_environment import CONSTRAINTS
from setup_needs import pinned, site_packages

from allstep.commands.horovod.build import cached_wheel
from allstep.commands.horovod.logged import CommandFailed, pip
from allstep.commands.horovod.patch_series import PatchFailed, series
from allstep.commands.horovod.target import Target


def make_environment(directory: Path) -> None:
    """Create an environment with the packages of .venv, and the unmodified Horovod.

    Raises:
        CommandFailed: a command failed; its log is in the directory.
        PatchFailed: a patch does not fit the source.
    """
    venv.create(directory, with_pip=True)
    python, log = directory / "bin" / "python", directory / "setup.log"
    print(f"installing packages and compiling Horovod: several minutes; log: {log}", flush=True)
    pip(python, "install", "-r", str(CONSTRAINTS), log=log)
    target = Target(
        python=python,
        site_packages=site_packages(directory),
        versions=pinned(CONSTRAINTS.read_text()),
    )
    wheel = cached_wheel(target, patches=series(["build"]))
    pip(python, "install", "--no-deps", str(wheel), log=log)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(f"expected one directory, received {sys.argv[1:]}; see {sys.argv[0]}", file=sys.stderr)
        sys.exit(2)
    try:
        make_environment(Path(sys.argv[1]).absolute())
    except (CommandFailed, PatchFailed) as error:
        sys.exit(str(error))
