"""Checks of a host's resources for ranks: cores, memory, limits, huge pages, CPU governor, and space for files."""

import os
import re
import resource
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from allstep.commands.doctor.finding import Finding, fault, ok, ranks, size, warning
from allstep.commands.shared.machine import content
from allstep.common.base.resources import available_memory, cpu_quota
from allstep.common.launch.spawn import resolves

# Measured for PyTorch or TensorFlow with Horovod and a small network; a large network needs more.
RANK_BYTES = 1_000_000_000
# Open MPI and NCCL keep some MB for each pair of ranks of a host in /dev/shm; Docker gives 64 MiB.
SHM_BYTES_PER_RANK = 64 * 2**20
# Generous estimate of the sockets and files of a rank with data loader, watch and Horovod.
OPEN_FILES = 1024


@dataclass(frozen=True)
class Machine:
    """Resources of a host."""

    num_cores: int
    """Number of cores that this process may use."""
    cpu_quota: float | None
    """Cores allowed by the control group; None without a limit."""
    num_threads: str | None
    """Value of OMP_NUM_THREADS."""
    memory: int
    """Available memory in bytes."""
    shm_free: int
    open_files: int | None
    """Maximum number of open files of a process; None without a limit, as in the next two fields."""
    processes: int | None
    locked_bytes: int | None
    infiniband: bool
    """Whether there is an InfiniBand card, whose direct memory access needs locked memory."""
    huge_pages: str | None
    """Policy of the kernel: always, madvise or never."""
    governors: tuple[str, ...]
    """CPU frequency governors in use."""
    unknown_name: str | None = None
    """Name of this host, if it cannot be resolved here."""


def read() -> Machine:
    """Read /proc, /sys and the limits of this process, which its children inherit."""
    shm = os.statvfs("/dev/shm")
    pages = re.search(r"\[(\w+)\]", content("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    governors = (content(path) for path in Path("/sys/devices/system/cpu").glob("cpu*/cpufreq/scaling_governor"))
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        num_threads=os.environ.get("OMP_NUM_THREADS"),
        memory=available_memory(),
        shm_free=shm.f_bavail * shm.f_frsize,
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=_limit(resource.RLIMIT_NPROC),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(Path("/sys/class").glob("infiniband/*")),
        huge_pages=pages[1] if pages else None,
        governors=tuple(sorted({one for one in governors if one})),
        unknown_name=None if resolves(name := socket.gethostname()) else name,
    )


def _limit(kind: int) -> int | None:
    maximum, _ = resource.getrlimit(kind)
    return None if maximum == resource.RLIM_INFINITY else maximum


def check(facts: Machine, num_ranks: int, num_gpus: int) -> list[Finding]:
    """Check whether the host has the resources for `num_ranks` ranks.

    `num_gpus` is the number of GPUs for the ranks of this host; without GPUs each rank needs a core.
    """
    return [
        _check_cores(facts, num_ranks, num_gpus),
        _check_memory(facts, num_ranks),
        _check_shm(facts, num_ranks),
        *_check_name(facts),
        *_check_limits(facts, num_ranks),
        *_check_speed(facts, num_gpus),
    ]


def _check_cores(facts: Machine, num_ranks: int, num_gpus: int) -> Finding:
    cores = min(facts.num_cores, facts.cpu_quota or facts.num_cores)
    counted = f"{cores:g} cores for {ranks(num_ranks)}"
    if 0 < num_gpus < num_ranks:
        return warning("cores", f"{ranks(num_ranks)} for {num_gpus} GPUs", f"give the host {num_gpus} slots")
    if num_ranks > cores:
        fix = f"give the host {max(1, int(cores))} slots, or expect ranks to wait for each other"
        return warning("cores", counted, fix)
    given = re.match(r"\d{1,9}", facts.num_threads or "")
    if given and int(given[0]) * num_ranks > cores:
        fix = "unset OMP_NUM_THREADS: the trainers divide the cores by the ranks"
        return warning("cores", f"{counted} of {given[0]} threads each", fix)
    return ok("cores", counted)


def _check_memory(facts: Machine, num_ranks: int) -> Finding:
    found = f"{size(facts.memory)} left for {ranks(num_ranks)}"
    if facts.memory < num_ranks * RANK_BYTES:
        fix = f"start fewer ranks (one takes {size(RANK_BYTES)} and more), or raise the limit of the container"
        return fault("memory", found, fix)
    return ok("memory", found)


def _check_shm(facts: Machine, num_ranks: int) -> Finding:
    found = f"{size(facts.shm_free)} free in /dev/shm"
    if facts.shm_free < num_ranks * SHM_BYTES_PER_RANK:
        fix = "remove what is left there, or start the container with --shm-size=1g (--ipc=host)"
        return warning("shared memory", found, fix)
    return ok("shared memory", found)


def _check_name(facts: Machine) -> list[Finding]:
    if facts.unknown_name is None:
        return []
    fix = f"add 127.0.1.1 {facts.unknown_name} to /etc/hosts there: torchrun waits for minutes without --local-addr"
    return [warning("host name", f"{facts.unknown_name} cannot be resolved on the host itself", fix)]


def _check_limits(facts: Machine, num_ranks: int) -> list[Finding]:
    findings = []
    if facts.open_files is not None and facts.open_files < OPEN_FILES:
        findings.append(warning("open files", f"at most {facts.open_files} a process", f"run ulimit -n {OPEN_FILES}"))
    if facts.processes is not None and facts.processes < 100 * num_ranks:
        fix = "raise nproc in /etc/security/limits.conf"
        findings.append(warning("processes", f"at most {facts.processes} with their threads", fix))
    if facts.infiniband and facts.locked_bytes is not None:
        fix = "set memlock to unlimited in /etc/security/limits.conf: InfiniBand locks its buffers"
        findings.append(fault("locked memory", f"at most {size(facts.locked_bytes)}", fix))
    return findings or [ok("limits", "open files, processes and locked memory suffice")]


def _check_speed(facts: Machine, num_gpus: int) -> list[Finding]:
    findings = []
    slow = [governor for governor in facts.governors if governor in ("powersave", "conservative")]
    if slow:
        fix = "run cpupower frequency-set -g performance, as root"
        findings.append(warning("governor", f"{slow[0]}: cores keep below their frequency", fix))
    elif facts.governors:
        findings.append(ok("governor", ", ".join(facts.governors)))
    if facts.huge_pages == "never":
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root"
        findings.append(warning("huge pages", "never: large buffers take longer to touch", fix))
    elif facts.huge_pages:
        findings.append(ok("huge pages", facts.huge_pages))
    return findings


# Sockets and logs of a rank need little; a checkpoint of ResNet-50 with its momentum takes 200 MB.
FULL_BYTES = 100_000_000
LOW_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Folder:
    """Folder to which a job writes."""

    path: str
    free_bytes: int
    free_files: int | None
    """Number of files that can still be created; None if the file system has no such limit."""
    writable: bool


def read_folders(data_dir: Path) -> tuple[Folder, ...]:
    """Read the state of working directory, temporary folder and data folder, or of their closest existing parent."""
    return tuple(_folder(path) for path in (Path.cwd(), Path(tempfile.gettempdir()), data_dir))


def _folder(path: Path) -> Folder:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    left = os.statvfs(there)
    return Folder(
        path=str(path),
        free_bytes=left.f_bavail * left.f_frsize,
        free_files=left.f_favail if left.f_files else None,
        writable=os.access(there, os.W_OK),
    )


def check_folders(facts: tuple[Folder, ...]) -> list[Finding]:
    """Return one finding for each folder with a problem, or one for all folders."""
    findings = []
    for folder in facts:
        free = f"{size(folder.free_bytes)} free in {folder.path}"
        if not folder.writable:
            findings.append(fault("disk", f"{folder.path} cannot be written", "change its owner or its mode"))
        elif folder.free_bytes < FULL_BYTES:
            findings.append(fault("disk", f"{free}: it is full", "remove files that are no longer needed"))
        elif folder.free_files == 0:
            findings.append(fault("disk", f"no file more fits in {folder.path}", "remove files there"))
        elif folder.free_bytes < LOW_BYTES:
            findings.append(warning("disk", free, "make room for checkpoints and data sets"))
    return findings or [ok("disk", ", ".join(f"{size(folder.free_bytes)} free in {folder.path}" for folder in facts))]
