"""Who am I? Rank, local rank and world size, read from the environment of whichever launcher started this process.

Every launcher tells its processes their place by environment variables of its own. This is the one file
that knows those names; everything else asks :func:`placement`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from allstep.common.errors import UserError


@dataclass(frozen=True)
class Placement:
    """The place of this process among the ranks of the job, in Horovod's terms."""

    launcher: str | None
    """Name of the launcher, None for a process started alone."""
    rank: int
    """0 <= rank < world_size, unique in the job."""
    world_size: int
    """Number of processes in the job."""
    local_rank: int
    """Number of this process among those on its host; it selects the GPU."""
    local_size: int
    """Number of processes of the job on this host."""
    cross_rank: int | None
    """Number of this host among the hosts of the job; None where the launcher does not tell."""
    cross_size: int | None
    """Number of hosts; None where the launcher does not tell."""
    hosts: tuple[str, ...]
    """Names of all hosts where the launcher tells them, else this host alone."""


ALONE = Placement(None, 0, 1, 0, 1, 0, 1, (socket.gethostname(),))


@dataclass(frozen=True)
class _Variables:
    """The names under which one launcher gives each number; alternatives in order of preference."""

    launcher: str
    marker: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


# Ours, for the ranks of `common.spawn`, which are all on one host.
SPAWN_PORT, SPAWN_LISTENER = "ALLSTEP_PORT", "ALLSTEP_LISTENER"
_SPAWN_RANK, _SPAWN_SIZE = "ALLSTEP_RANK", "ALLSTEP_SIZE"

# The innermost launcher comes first: torchrun inside an MPI job sets its own names and leaves those of MPI
# in place; mpirun inside a Slurm allocation likewise. A Slurm batch script has SLURM_PROCID too, but no
# SLURM_STEP_ID: only what srun started is a rank.
_LAUNCHERS = (
    _Variables("allstep", SPAWN_PORT, (_SPAWN_RANK,), (_SPAWN_SIZE,), (_SPAWN_RANK,), (_SPAWN_SIZE,)),
    _Variables(
        "torchrun",
        "TORCHELASTIC_RUN_ID",
        ("RANK",),
        ("WORLD_SIZE",),
        ("LOCAL_RANK",),
        ("LOCAL_WORLD_SIZE",),
        ("GROUP_RANK",),
        ("GROUP_WORLD_SIZE",),
    ),
    _Variables(
        "horovodrun",
        "HOROVOD_RANK",
        ("HOROVOD_RANK",),
        ("HOROVOD_SIZE",),
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        ("HOROVOD_CROSS_RANK",),
        ("HOROVOD_CROSS_SIZE",),
        ("HOROVOD_HOSTNAME",),
    ),
    _Variables(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        hosts=("PMIX_HOSTNAME",),
    ),
    _Variables("mpiexec", "MPI_LOCALRANKID", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _Variables("PMI", "PMI_LOCAL_RANK", ("PMI_RANK",), ("PMI_SIZE",), ("PMI_LOCAL_RANK",), ("PMI_LOCAL_SIZE",)),
    _Variables(
        "srun",
        "SLURM_STEP_ID",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
)


def placement(environ: Mapping[str, str] = os.environ) -> Placement:
    """Read this process's place from the environment.

    Returns: the place given by the innermost launcher, or `ALONE` without one.

    Raises:
        UserError: a launcher's variables are incomplete or contradict each other.
    """
    for variables in _LAUNCHERS:
        if variables.marker in environ:
            return _read(variables, environ)
    return ALONE


def refuse_elastic(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse to be a rank of a job whose number of ranks changes: `placement` reads it once.

    Raises:
        UserError: horovodrun started this rank in an elastic job.
    """
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise UserError(
            "expected a job of a fixed number of ranks, received an elastic one; start it by horovodrun without "
            "--min-np, --max-np and --host-discovery-script"
        )


def spawned_environment(rank: int, num_ranks: int, listener: socket.socket) -> dict[str, str]:
    """What `common.spawn` tells a rank; `listener` is the socket that rank 0 takes over."""
    port, number = listener.getsockname()[1], listener.fileno()
    return {_SPAWN_RANK: f"{rank}", _SPAWN_SIZE: f"{num_ranks}", SPAWN_PORT: f"{port}", SPAWN_LISTENER: f"{number}"}


def _read(variables: _Variables, environ: Mapping[str, str]) -> Placement:
    def text(names: tuple[str, ...]) -> str | None:
        return next((environ[name] for name in names if name in environ), None)

    def number(names: tuple[str, ...]) -> int:
        value = text(names)
        if value is None or not value.isdecimal():
            received = "nothing" if value is None else repr(value)
            raise UserError(
                f"expected a number in {names[0]} from {variables.launcher}, received {received}; "
                f"start the job by its launcher, or unset {variables.marker}"
            )
        return int(value)

    rank, world_size = number(variables.rank), number(variables.world_size)
    local_rank = number(variables.local_rank)
    cross_rank = number(variables.cross_rank) if variables.cross_rank else None
    cross_size = number(variables.cross_size) if variables.cross_size else None
    if variables.launcher == "srun":
        local_size = tasks_per_node(text(variables.local_size) or str(world_size))[cross_rank]
    else:
        local_size = number(variables.local_size)
    if cross_rank is None:
        cross_rank, cross_size = _cross_by_slot(rank, world_size, local_rank, local_size)
    if not (rank < world_size and local_rank < local_size <= world_size):
        raise UserError(
            f"expected a rank below the number of ranks from {variables.launcher}, received rank "
            f"{rank} of {world_size}, local rank {local_rank} of {local_size}; unset {variables.marker} or start anew"
        )
    hosts = text(variables.hosts)
    return Placement(
        variables.launcher,
        rank,
        world_size,
        local_rank,
        local_size,
        cross_rank,
        cross_size,
        tuple(expand_nodelist(hosts)) if hosts else (socket.gethostname(),),
    )


def _cross_by_slot(rank: int, world_size: int, local_rank: int, local_size: int) -> tuple[int | None, int | None]:
    """Host number and number of hosts when ranks fill equal hosts in order; MPI launchers do not tell them."""
    if world_size % local_size or (rank - local_rank) % local_size:
        return None, None
    return (rank - local_rank) // local_size, world_size // local_size


# More than any cluster has. A list that says more is a mistake, or meant to fill the memory.
_MOST_HOSTS = 2**16


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's tasks-per-node list: `4(x2),3` is [4, 4, 3].

    Raises:
        UserError: it is none.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:\(x(\d{1,5})\))?", part, re.ASCII)
        if not match or len(counts) > _MOST_HOSTS:
            raise UserError(
                f"expected Slurm's tasks per node as in 4(x2),3, received {text[:60]!r}; check SLURM_TASKS_PER_NODE"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodelist(text: str) -> list[str]:
    """Expand Slurm's compact host list: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        UserError: it is none, or has more hosts than any cluster.
    """

    def wrong(received: str) -> UserError:
        return UserError(
            f"expected a list of hosts as in gpu[01-03,7],login, received {received}; check the launcher's host list"
        )

    part = r"(?:[^\s,\[\]]|\[[^\s\[\]]+\])+"
    if not re.fullmatch(f"{part}(?:,{part})*", text):
        raise wrong(ascii(text[:60]))
    hosts: list[str] = []
    for name in re.findall(part, text):
        expanded = [""]
        for literal, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", name):
            spans = map(_span, ranges.split(",")) if ranges else [[""]]
            numbers = list(islice(chain.from_iterable(spans), _MOST_HOSTS + 1))
            if len(hosts) + len(expanded) * len(numbers) > _MOST_HOSTS:
                raise wrong(f"more than {_MOST_HOSTS} of them")
            expanded = [head + literal + number for head in expanded for number in numbers]
        hosts += expanded
    return hosts


def _span(span: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d{1,250})(?:-(\d{1,250}))?", span, re.ASCII)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(
            f"expected a span of host numbers as in 01-03, received {ascii(span[:60])}; check the launcher's host list"
        )
    return (str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2] or match[1]) + 1))


def threads_per_rank(place: Placement, environ: Mapping[str, str] = os.environ) -> int:
    """Number of compute threads for this rank, so that the ranks of a host fill its cores once.

    A number that the user gives in OMP_NUM_THREADS wins. A launcher that bound the rank to cores has
    divided them already; else the cores are divided by the ranks on the host.
    """
    if environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(environ["OMP_NUM_THREADS"]))
    cores = len(os.sched_getaffinity(0))
    bound = environ.get("OMPI_MCA_orte_bound_at_launch") == "1"
    return cores if bound else max(1, cores // place.local_size)


def gpu_of_rank(place: Placement, num_gpus: int, environ: Mapping[str, str] = os.environ) -> int:
    """Number of this rank's GPU among the `num_gpus` that it sees: its local rank.

    Slurm can give each rank a GPU of its own (--gpus-per-task); it is then the only one that the rank sees.

    Raises:
        UserError: there are more ranks on the host than GPUs.
    """
    if num_gpus == 1 and place.launcher == "srun" and {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(environ):
        return 0
    if place.local_size > num_gpus:
        raise UserError(
            f"expected at most one rank per GPU, received {place.local_size} ranks for {num_gpus} GPUs; start fewer "
            "ranks or set CUDA_VISIBLE_DEVICES= for CPUs"
        )
    return place.local_rank
