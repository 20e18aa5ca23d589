"""Rank, local rank and world size of this process, read from the environment variables of its launcher.

Each launcher sets different environment variables. Only this file knows their names; all other code calls
`find_placement`.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from allstep.common.base.errors import UserError, quoted
from allstep.common.base.resources import cpu_quota, usable_cores
from allstep.common.launch.variables import (
    MAX_RANKS,
    expand_nodelist,
    read_address,
    read_num_threads,
    read_number,
    tasks_per_node,
)


@dataclass(frozen=True)
class Placement:
    """Placement of this process among the ranks of the job, in Horovod's terms."""

    launcher: str | None
    """Name of the launcher; None for a process without one."""
    rank: int
    """Number of this process in the job, 0 <= rank < world_size."""
    world_size: int
    """Number of processes in the job."""
    local_rank: int
    """Number of this process among those on its host; it selects the GPU."""
    local_size: int
    """Number of processes of the job on this host."""
    cross_rank: int | None
    """Number of this host among the hosts of the job; None if unknown."""
    hosts: tuple[str, ...]
    """Names of all hosts if the launcher gives them, else only this host."""


ALONE = Placement(None, 0, 1, 0, 1, 0, (socket.gethostname(),))


BY_HAND = "env://"
"""Launcher name for ranks whose RANK and WORLD_SIZE were set by the user or a scheduler; torch's term for this."""


@dataclass(frozen=True)
class _Variables:
    """Environment variables in which a launcher gives each number; alternatives in order of preference."""

    launcher: str
    markers: tuple[str, ...]
    """Variables any of which shows that this launcher started the process."""
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]
    cross_rank: str | None = None
    cross_size: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    rendezvous: tuple[str, str] | None = None
    """Variables for address and port of the ranks' rendezvous, if the launcher gives these."""


# Variables of `common.launch.spawn`, whose ranks are all on one host.
SPAWN_PORT, SPAWN_LISTENER = "ALLSTEP_PORT", "ALLSTEP_LISTENER"
_SPAWN_RANK, _SPAWN_SIZE = "ALLSTEP_RANK", "ALLSTEP_SIZE"

MASTER = ("MASTER_ADDR", "MASTER_PORT")
GLOO_STORE = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _prefixed(launcher: str, prefix: str, **others: Any) -> _Variables:
    """Return the variables of a launcher that names all of them alike; `others` are more fields, or replace these."""
    rank, size, local_rank, local_size = (f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return replace(_Variables(launcher, (rank, size), rank, (size,), local_rank, (local_size,)), **others)


# The innermost launcher comes first: torchrun inside an MPI job sets its variables and leaves those of MPI in
# place, and so does mpirun inside a Slurm allocation. A Slurm batch script has SLURM_PROCID, too, but no
# SLURM_STEP_ID: only processes that srun started are ranks.
_LAUNCHERS = (
    _Variables("allstep", (SPAWN_PORT,), _SPAWN_RANK, (_SPAWN_SIZE,), _SPAWN_RANK, (_SPAWN_SIZE,)),
    _Variables(
        "torchrun",
        ("TORCHELASTIC_RUN_ID",),
        "RANK",
        ("WORLD_SIZE",),
        "LOCAL_RANK",
        ("LOCAL_WORLD_SIZE",),
        "GROUP_RANK",
        ("GROUP_WORLD_SIZE",),
        rendezvous=MASTER,
    ),
    _prefixed(
        "horovodrun",
        "HOROVOD",
        cross_rank="HOROVOD_CROSS_RANK",
        cross_size=("HOROVOD_CROSS_SIZE",),
        hosts=("HOROVOD_HOSTNAME",),
        rendezvous=GLOO_STORE,
    ),
    _prefixed("mpirun", "OMPI_COMM_WORLD", hosts=("PMIX_HOSTNAME",)),
    _prefixed("jsrun", "JSM_NAMESPACE"),
    _prefixed("mpirun_rsh", "MV2_COMM_WORLD"),
    _prefixed(
        "mpiexec",
        "PMI",
        markers=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        local_rank="MPI_LOCALRANKID",
        local_size=("MPI_LOCALNRANKS",),
    ),
    _prefixed("PMI", "PMI", markers=("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
    _Variables(
        "srun",
        ("SLURM_STEP_ID",),
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "SLURM_NODEID",
        ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    ),
)

# Value of each variable in a job with a single rank.
_SET_BY_HAND = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def find_placement(environ: Mapping[str, str] = os.environ) -> Placement:
    """Read this process's placement from the environment.

    It is the one given by the innermost launcher, or by RANK and WORLD_SIZE without a launcher (then
    `common.launch.env_launcher.locate` finds out which ranks share a host), or `ALONE`. Raises UserError if a
    launcher's variables are incomplete or contradict each other.
    """
    for variables in _LAUNCHERS:
        if any(marker in environ for marker in variables.markers):
            if variables.launcher == "srun" and _is_shell(environ):
                continue
            placement = _read(variables, environ)
            _check_agreement(placement, environ)
            return placement
    return _by_hand(environ)


def apparent_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank of a process whose environment may be wrong, which decides the rank that reports the error."""
    found = [variables for variables in _LAUNCHERS if any(marker in environ for marker in variables.markers)]
    names = [*(variables.rank for variables in found), "RANK"]
    return next((int(environ[name]) for name in names if re.fullmatch("[0-9]{1,7}", environ.get(name, ""))), 0)


def spawned_environment(rank: int, num_ranks: int, listener: socket.socket) -> dict[str, str]:
    """Return the environment that `common.launch.spawn` gives a rank; rank 0 takes over the socket `listener`."""
    port, number = listener.getsockname()[1], listener.fileno()
    return {_SPAWN_RANK: f"{rank}", _SPAWN_SIZE: f"{num_ranks}", SPAWN_PORT: f"{port}", SPAWN_LISTENER: f"{number}"}


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Return whether the Slurm step is the shell that salloc starts: one task, in an allocation for several."""
    return environ.get("SLURM_STEP_NUM_TASKS") == "1" and environ.get("SLURM_NTASKS", "1") != "1"


def _read(variables: _Variables, environ: Mapping[str, str]) -> Placement:
    markers = [marker for marker in variables.markers if marker in environ]
    remedy = f"start the job by {variables.launcher} again, or unset {' and '.join(markers)}"

    def present(names: tuple[str, ...]) -> str:
        return next((name for name in names if name in environ), names[0])

    def number(name: str, minimum: int, maximum: int) -> int:
        return read_number(name, environ, minimum=minimum, maximum=maximum, remedy=remedy)

    world_size = number(present(variables.world_size), 1, MAX_RANKS)
    rank = number(variables.rank, 0, world_size - 1)
    cross_rank = None
    if variables.cross_rank:
        cross_size = number(present(variables.cross_size), 1, world_size)
        cross_rank = number(variables.cross_rank, 0, cross_size - 1)
    hosts = (socket.gethostname(),)
    if any(name in environ for name in variables.hosts):
        hosts = tuple(expand_nodelist(environ[present(variables.hosts)]))
    if variables.launcher == "srun":
        assert cross_rank is not None  # srun has a variable for it
        name = present(variables.local_size)
        tasks = tasks_per_node(environ.get(name, str(world_size)))
        if len(tasks) != cross_size or len(hosts) != cross_size or not 1 <= tasks[cross_rank] <= world_size:
            raise UserError(
                f"expected the name and the tasks of each of {cross_size} nodes from srun, received {len(hosts)} "
                f"names and {name}={quoted(environ.get(name))}; {remedy}"
            )
        local_size = tasks[cross_rank]
    else:
        local_size = number(present(variables.local_size), 1, world_size)
    local_rank = number(variables.local_rank, 0, local_size - 1)
    if cross_rank is None:
        cross_rank = _cross_by_slot(rank, world_size, local_rank, local_size)
    if variables.rendezvous:
        read_address(*variables.rendezvous, environ, remedy=remedy)
    return Placement(variables.launcher, rank, world_size, local_rank, local_size, cross_rank, hosts)


def _cross_by_slot(rank: int, world_size: int, local_rank: int, local_size: int) -> int | None:
    """Return the number of the host if ranks fill equal hosts in order, else None; MPI launchers do not give it."""
    if world_size % local_size or (rank - local_rank) % local_size:
        return None
    return (rank - local_rank) // local_size


def _by_hand(environ: Mapping[str, str]) -> Placement:
    """Return the placement that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT give a process without a launcher."""
    given = _given_by_hand(environ)
    if not given:
        return ALONE
    remedy = f"give each rank RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset {' and '.join(given)}"
    world_size = read_number("WORLD_SIZE", environ, minimum=1, remedy=remedy)
    rank = read_number("RANK", environ, maximum=world_size - 1, remedy=remedy)
    local_rank, local_size = 0, 1
    if environ.get("LOCAL_WORLD_SIZE"):
        local_size = read_number("LOCAL_WORLD_SIZE", environ, minimum=1, maximum=world_size, remedy=remedy)
    if environ.get("LOCAL_RANK"):
        maximum = local_size if environ.get("LOCAL_WORLD_SIZE") else world_size
        local_rank = read_number("LOCAL_RANK", environ, maximum=maximum - 1, remedy=remedy)
    if world_size == 1:
        return ALONE
    read_address(*MASTER, environ, remedy=remedy)
    return Placement(BY_HAND, rank, world_size, local_rank, local_size, None, (socket.gethostname(),))


def _given_by_hand(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that imply other ranks, or have invalid values."""
    return [name for name, alone in _SET_BY_HAND.items() if environ.get(name, "") not in ("", alone)]


def _check_agreement(placement: Placement, environ: Mapping[str, str]) -> None:
    """Refuse RANK and WORLD_SIZE that contradict the launcher, because they imply a larger job than it started."""
    expected = {"RANK": str(placement.rank), "WORLD_SIZE": str(placement.world_size)}
    received = {name: environ[name] for name in expected if environ.get(name)}
    if {"RANK", "WORLD_SIZE"} & set(_given_by_hand(environ)) and not received.items() <= expected.items():
        raise UserError(
            f"expected RANK and WORLD_SIZE to say rank {placement.rank} of {placement.world_size} as "
            f"{placement.launcher} does, "
            f"received {' and '.join(f'{name}={quoted(text)}' for name, text in received.items())}; unset them"
        )


def threads_per_rank(
    placement: Placement, environ: Mapping[str, str] = os.environ, *, slices: int | None = None
) -> int:
    """Return the number of compute threads for this rank, so that the ranks of a host together use each core once.

    OMP_NUM_THREADS takes precedence. With --slices the default is 1 on any number of ranks, because sums within an
    operation depend on the number of threads. Raises UserError if OMP_NUM_THREADS is not a number.
    """
    return read_num_threads(environ) or (1 if slices else cores_per_rank(placement, environ))


def cores_per_rank(placement: Placement, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores that are this rank's share of its host, at least 1.

    A launcher that binds ranks to cores has already divided them; otherwise they are divided by the ranks on the host.
    """
    share = usable_cores() // placement.local_size
    if environ.get("OMPI_MCA_orte_bound_at_launch") == "1":
        quota = cpu_quota()
        cores = len(os.sched_getaffinity(0))
        share = cores if quota is None else min(cores, int(quota) // placement.local_size)
    return max(1, share)
