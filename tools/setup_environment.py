"""Set up .venv for training; `make setup` runs this file by tools/setup.sh.

The set-up has six steps, seven for GPUs, each with a fingerprint of what it depends on. Steps whose fingerprints
are in .venv/allstep-setup.json are done; the first step that differs, and all after it, run again. A step is
removed from the record before it starts and added when it has succeeded, so an interrupted set-up is never
mistaken for a finished one.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import setup_needs
import tensorflow_gpu
import this_checkout  # noqa: F401  # first: makes allstep.* importable
from setup_needs import choose, pinned, site_packages

from allstep.commands.horovod import build, prerequisites
from allstep.commands.horovod import self_test as horovod_test
from allstep.commands.horovod.install import open_mpi_parameters, write_open_mpi_parameters
from allstep.commands.horovod.logged import CommandFailed, pip, run_logged
from allstep.commands.horovod.patch_series import Patch, PatchFailed, series
from allstep.commands.horovod.prerequisites import find_driver
from allstep.commands.horovod.target import Target
from allstep.common.base.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
LOG = ENVIRONMENT / "allstep-setup.log"
RECORD = ENVIRONMENT / "allstep-setup.json"
SELF_TEST = REPOSITORY / "commands" / "horovod" / "self_test.py"
CONSTRAINTS = REPOSITORY / "constraints.txt"
GPU_CONSTRAINTS = REPOSITORY / "constraints-gpu.txt"
TENSORFLOW_GPU_CONSTRAINTS = REPOSITORY / "constraints-tensorflow-gpu.txt"


@dataclass(frozen=True)
class Step:
    title: str
    depends_on: str
    run: Callable[[], None]


def setup_steps(*, gpu: bool) -> list[Step]:
    """Return the steps in order."""
    pins = packages(gpu=gpu)
    tensorflow = TENSORFLOW_GPU_CONSTRAINTS.read_text() + Path(tensorflow_gpu.__file__).read_text()
    tensorflow_step = Step("TensorFlow, with CUDA 12 of its own", tensorflow, install_tensorflow_gpu)
    target, patches = horovod_target(gpu=gpu), series()
    recipe = build.recipe(target, patches)
    mpi = str(open_mpi_parameters(ENVIRONMENT))
    packaging = "".join((REPOSITORY / name).read_text() for name in ("setup.cfg", "pyproject.toml"))
    return [
        # Environments for CPUs and for GPUs are never converted: each has packages that the other must not have.
        Step("a fresh .venv", f"{sys.version} {ENVIRONMENT}{' GPU' * gpu}", make_environment),
        Step("packages", pins, lambda: install_packages(pins)),
        *([tensorflow_step] if gpu else []),
        Step("Horovod", recipe, lambda: install_horovod(target, patches)),
        Step("Open MPI's parameters", mpi, lambda: write_open_mpi_parameters(ENVIRONMENT)),
        Step("allstep itself, editable", packaging, install_allstep),
        Step("self-test", SELF_TEST.read_text(), lambda: self_test(gpu=gpu)),
    ]


def fingerprints(steps: list[Step]) -> list[str]:
    """Return a fingerprint of each step, which includes all steps before it."""
    running, prints = hashlib.sha256(), []
    for step in steps:
        running.update(f"{step.title}\0{step.depends_on}\0".encode())
        prints.append(running.hexdigest())
    return prints


def make_environment() -> None:
    """Create an empty virtual environment in place of the existing one."""
    if ENVIRONMENT.exists():
        for entry in ENVIRONMENT.iterdir():
            if entry == RECORD:
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    # sys.executable may be in the environment that was just removed.
    command = [os.path.realpath(f"/proc/{os.getpid()}/exe"), "-m", "venv", str(ENVIRONMENT)]
    run_logged(command, LOG)


def packages(*, gpu: bool) -> str:
    """Return the pinned packages; for GPUs with nvcc, and without TensorFlow, which has its own folder."""
    pins = CONSTRAINTS.read_text()
    if not gpu:
        return pins
    shared = [line for line in pins.splitlines(keepends=True) if not line.startswith("tensorflow-cpu==")]
    return "".join(shared) + GPU_CONSTRAINTS.read_text()


def install_packages(pins: str) -> None:
    requirements = ENVIRONMENT / "allstep-packages.txt"
    requirements.write_text(pins)
    _pip("install", "--upgrade", "-r", str(requirements), progress=_PackageCount(_num_pins(pins)))


def install_tensorflow_gpu() -> None:
    """Install TensorFlow and CUDA 12 in their folder, in place of what an interrupted set-up has left there."""
    folder, temporary = tensorflow_gpu.folder(ENVIRONMENT), ENVIRONMENT / "tmp"
    shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir(exist_ok=True)
    target = ["install", "--no-deps", "--target", str(folder), "-r", str(TENSORFLOW_GPU_CONSTRAINTS)]
    # pip unpacks 6 GB into a temporary folder and moves them; /tmp may be too small or on another disk.
    _pip(*target, progress=_PackageCount(0), env={"TMPDIR": str(temporary)})
    shutil.rmtree(temporary)
    tensorflow_gpu.tidy_and_link(ENVIRONMENT)


def horovod_target(*, gpu: bool) -> Target:
    """Return what Horovod is built for in .venv."""
    constraints = packages(gpu=gpu) + (TENSORFLOW_GPU_CONSTRAINTS.read_text() if gpu else "")
    return Target(python=PYTHON, site_packages=site_packages(ENVIRONMENT), versions=pinned(constraints), gpu=gpu)


def install_horovod(target: Target, patches: list[Patch]) -> None:
    wheel = build.cached_wheel(target, patches=patches)
    _pip("install", "--no-deps", "--force-reinstall", str(wheel))


def install_allstep() -> None:
    _pip("install", "--no-deps", "--no-build-isolation", "--editable", str(REPOSITORY))


def self_test(*, gpu: bool) -> None:
    run_logged(horovod_test.command(PYTHON, *(["--gpu"] if gpu else [])), LOG, progress=horovod_test.progress)


def _pip(*arguments: str, **options: Any) -> None:
    pip(PYTHON, *arguments, log=LOG, **options)


def _num_pins(pins: str) -> int:
    lines = pins.splitlines()
    return len({line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")})


class _PackageCount:
    """Counter of pip's packages; the total is approximate, since torch adds some twenty that are not pinned here."""

    def __init__(self, num_pins: int) -> None:
        self.about = num_pins + 20
        self.count = 0

    def __call__(self, line: str) -> str | None:
        if line.startswith("Installing collected packages"):
            return "installing them (a minute or so)"
        if line.startswith(("Collecting ", "Processing ")):
            self.count += 1
            if self.count % 10 == 0:
                return f"package {self.count} of about {self.about}"
        return None


def recorded() -> dict | None:
    """Return the record of the last set-up: `gpu`, and the fingerprints of steps `done`; None if there was none.

    Raises:
        UserError: .venv exists, but was not created by a set-up.
    """
    if RECORD.exists():
        try:
            found = json.loads(RECORD.read_text())
            return {"gpu": bool(found["gpu"]), "done": list(map(str, found["done"]))}
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"expected what the last make setup did in {RECORD}, received something else; remove {ENVIRONMENT}"
            ) from None
    if ENVIRONMENT.exists() and any(ENVIRONMENT.iterdir()):
        raise UserError(
            f"expected an environment of make setup in {ENVIRONMENT}, received another, which would be overwritten; "
            "move it away"
        )
    return None


def record(done: list[str], *, gpu: bool) -> None:
    temporary = RECORD.with_suffix(".new")
    temporary.write_text(json.dumps({"gpu": gpu, "done": done}))
    os.replace(temporary, RECORD)


def set_up() -> None:
    """Run the steps that are not done yet."""
    before = recorded()
    choice = choose(os.environ.get("GPU", ""), before=before["gpu"] if before else None, driver=find_driver())
    gpu = choice.gpu
    steps = setup_steps(gpu=gpu)
    prints = fingerprints(steps)
    done = before["done"] if before else []
    num_done = len(os.path.commonprefix([done, prints]))
    if num_done == len(done) == 1:
        # Installing packages was interrupted, and pip may consider a partly installed package complete.
        num_done = 0
    kind = f"Python {sys.version.split()[0]}, for {'GPUs' if gpu else 'CPUs'}: {choice.reason}"
    if num_done == len(steps):
        print(f".venv is ready ({kind})")
        return
    print(f".venv will be for {'GPUs' if gpu else 'CPUs'}: {choice.reason}", flush=True)
    setup_needs.check(_needed_gb(num_done, gpu=gpu))
    ENVIRONMENT.mkdir(exist_ok=True)
    build.cache_folder().mkdir(parents=True, exist_ok=True)  # fails now, not after minutes of downloads
    for i in range(num_done, len(steps)):
        record(prints[:i], gpu=gpu)
        print(f"[{i + 1}/{len(steps)}] {steps[i].title}", flush=True)
        steps[i].run()
        record(prints[: i + 1], gpu=gpu)
    print(f".venv is ready ({kind}); its commands are in .venv/bin (source .venv/bin/activate)")


def _needed_gb(num_done: int, *, gpu: bool) -> dict[Path, float]:
    """Return the disk space in GB that the steps after the first `num_done` still need, by folder."""
    tensorflow = setup_needs.TENSORFLOW_GPU_GB if gpu and num_done < 3 else 0
    if num_done >= 2:  # the packages are installed
        needed = tensorflow or prerequisites.BUILD_GB
    else:  # leftovers of an interrupted set-up are removed first, which frees their space
        left = sum(path.lstat().st_blocks for path in ENVIRONMENT.rglob("*")) * 512 / 1e9
        needed = setup_needs.PACKAGES_GB + tensorflow - left
    return {ENVIRONMENT: needed, build.cache_folder(): prerequisites.BUILD_GB}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # One set-up at a time in a checkout; its commands end with it, also where it is killed.
        with (REPOSITORY / "setup.cfg").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up()
    except UserError as error:
        print(f"make setup: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # e.g. a checkout or cache that is not writable, or a full disk
        where = error.filename or REPOSITORY
        print(
            f"make setup: expected files that can be written, received {where}: {error.strerror}; fix that and run "
            "it again: it goes on from the last finished step",
            file=sys.stderr,
        )
        sys.exit(2)
    except (CommandFailed, PatchFailed) as error:
        print(f"make setup failed:\n{error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nmake setup: interrupted; the next call goes on from the last finished step", file=sys.stderr)
        sys.exit(130)
