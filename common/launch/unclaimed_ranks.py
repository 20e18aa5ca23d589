"""Checks for signs that this process should be one of several ranks, although no launcher has given it a rank.

Each such process would train independently, and exit with status 0. So a sign that no launcher and no strategy accounts
for is an error. `current_ranks` counts the ranks of a user's program.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping

from allstep.common.base.errors import UserError, quoted
from allstep.common.launch import tf_config
from allstep.common.launch.placement import Placement, find_placement
from allstep.common.launch.variables import read_number

_INSTEAD = "start the job by horovodrun, mpirun or srun"
# Variables of launchers that do not give the number of ranks, or the local rank, which selects the GPU.
_LONE_RANKS = ("PMI_RANK", "PMI_SIZE", "PMI_ID", "PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK")
# Variables from which torchrun takes its flags, set by Kubernetes operators, and those of schedulers that start the
# same command on each of several nodes.
_NODES = (
    *("PET_NNODES", "PET_NPROC_PER_NODE"),
    *("AWS_BATCH_JOB_NUM_NODES", "AZUREML_NODE_COUNT", "SKYPILOT_NUM_NODES"),
)


def check_alone(
    placement: Placement,
    *,
    chosen: bool,
    to_train_alone: str = "give --strategy single",
) -> None:
    """Refuse a process that would train independently although the environment shows signs of other ranks.

    `chosen` tells whether the user has chosen a strategy with one process, or one that starts its ranks itself; in the
    shell of a Slurm allocation that is not a mistake, since no other process has been started yet. The message names
    the sign, and `to_train_alone`: how a user asks for one process in a Slurm allocation for several.
    """
    num_processes = tf_config.num_processes(os.environ.get("TF_CONFIG", ""))
    if num_processes not in (1, placement.world_size):
        raise UserError(
            f"expected TF_CONFIG with --strategy {' or '.join(tf_config.ROLES)} of TensorFlow alone, received "
            f"one of {num_processes} processes for a job of {placement.world_size}; unset it, or give one of these"
        )
    if placement.launcher is None:
        for expected, received, remedy in _signs(os.environ, chosen=chosen, to_train_alone=to_train_alone):
            raise UserError(f"expected {expected}, received {received}; {remedy}")


def default_strategy(placement: Placement, strategies: Collection[str]) -> str:
    """Return the default of `--strategy` among the framework's `strategies`.

    It is Horovod on several ranks, or DDP under torchrun if Horovod is not installed.
    """
    if placement.launcher == "torchrun" and "ddp" in strategies and importlib.util.find_spec("horovod") is None:
        return "ddp"
    return "horovod" if placement.launcher or _allocated_tasks(os.environ) > 1 else "single"


def process_group() -> tuple[int, int] | None:
    """Return rank and world size of the process group that the program has initialised in PyTorch, if any."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None


def _signs(environ: Mapping[str, str], *, chosen: bool, to_train_alone: str) -> Iterator[tuple[str, str, str]]:
    """Yield what was expected, what was received, and what to do, for each sign."""
    if (group := process_group()) and group[1] > 1:
        received = f"a process group of {group[1]} ranks, which the program has started itself"
        yield "ranks of a launcher", received, "start them by torchrun, in place of torch.multiprocessing.spawn"
    lone = [name for name in _LONE_RANKS if name in environ]
    if lone and (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) != ("0", "1"):
        received = " and ".join(f"{name}={quoted(environ[name])}" for name in lone)
        yield "a rank, a number of ranks and a local rank from the launcher", received, f"{_INSTEAD}, or unset them"
    hosts = environ.get("SM_HOSTS", "[]")
    if not _has_one_at_most(hosts):
        remedy = "have SageMaker start torchrun or MPI (its `distribution`), or unset SM_HOSTS"
        yield "one host in SM_HOSTS without a launcher", quoted(hosts), remedy
    for name in _NODES:
        if environ.get(name, "1") not in ("1", "1:1"):
            yield f"{name} with a launcher alone", f"{quoted(environ[name])} without one", "use torchrun, or unset it"
    if environ.get("SLURM_PROCID", "0") != "0":
        received = f"SLURM_PROCID={quoted(environ['SLURM_PROCID'])} without SLURM_STEP_ID"
        yield "all that srun gives its tasks", received, "start by srun, and pass its variables on, or unset them"
    num_tasks = _allocated_tasks(environ)
    if num_tasks > 1 and not chosen:
        yield (
            f"a process for each of the {num_tasks} tasks that Slurm has allocated",
            "one that srun has not started",
            f"start them by srun or horovodrun, or {to_train_alone} to train alone",
        )


def _has_one_at_most(hosts: str) -> bool:
    """Return whether the text is a JSON list of at most one item."""
    try:
        return len(json.loads(hosts)) <= 1
    except (ValueError, TypeError, RecursionError):
        return False


def _allocated_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks that srun would start in this Slurm allocation; 1 outside an allocation."""

    def number(*names: str) -> int:
        name = next((name for name in names if name in environ), None)
        return read_number(name, environ, minimum=1, remedy="correct it, or unset it") if name else 1

    if "SLURM_NTASKS" in environ:
        return number("SLURM_NTASKS")
    return number("SLURM_NTASKS_PER_NODE") * number("SLURM_JOB_NUM_NODES", "SLURM_NNODES")


def current_ranks() -> tuple[int, int]:
    """Return rank and world size from the initialised library, or from the launcher if there is none yet.

    Variables of a launcher do not show ranks that a program has started itself (`torch.multiprocessing.spawn`), and
    those of an elastic job stay as they were when its ranks change.

    Raises UserError if this process would wrongly count as the only one.
    """
    libraries = [sys.modules.get(name) for name in ("horovod.torch", "horovod.tensorflow")]
    found = [(one.rank(), one.size()) for one in libraries if one and one.is_initialized()]
    if group := process_group():
        found.append(group)
    if found:
        return max(found, key=lambda ranks: ranks[1])  # a program may have a process group of one rank besides
    placement = find_placement()
    check_alone(placement, chosen=False, to_train_alone="unset SLURM_NTASKS")
    return placement.rank, placement.world_size
