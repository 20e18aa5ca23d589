"""Choice of the device that a rank trains on, by --device, the rank's placement and the visible GPUs.

Each rank decides by its host: it takes a GPU if the host has one for each of its ranks. The choices are compared once
ranks can communicate, because all ranks must train on GPUs, or all on CPUs.
"""

import os
from collections.abc import Mapping

from allstep.common.base.errors import UserError, note
from allstep.common.launch.placement import Placement


def choose_gpu(wanted: str, placement: Placement, num_gpus: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this rank's GPU among the `num_gpus` that it sees; None for the CPU.

    `wanted` is auto, cpu or cuda. Raises UserError if it is cuda, and this host has fewer GPUs than ranks.
    """
    if wanted == "cpu":
        return None
    if num_gpus == 1 and _is_its_own(placement, environ):
        return 0
    if placement.local_size <= num_gpus:
        return placement.local_rank
    if wanted == "cuda":
        raise UserError(
            f"expected a GPU for each rank with --device cuda, received {_count(placement.local_size, 'rank')} for "
            f"{_count(num_gpus, 'GPU')} that a rank of this host sees; start fewer ranks, or give --device cpu"
        )
    return None


def report_choice(gpu: int | None, wanted: str, placement: Placement, num_gpus: int) -> None:
    """Print in one line, on rank 0, which device auto has chosen, if there was a choice."""
    if wanted != "auto" or placement.rank or not num_gpus:
        return
    chosen = "on GPUs, one for each rank"
    if gpu is None:
        few = f"{_count(placement.local_size, 'rank')} of this host for {_count(num_gpus, 'GPU')}"
        chosen = f"on the CPU: {few}, and each would need its own"
    note(f"training {chosen}; --device cpu or cuda insists")


def check_agreement(num_on_gpus: int, placement: Placement) -> None:
    """Refuse a job in which only some hosts have GPUs for their ranks, of which `num_on_gpus` have chosen one.

    Every rank calls it.
    """
    if num_on_gpus not in (0, placement.world_size):
        raise UserError(
            f"expected GPUs for all {placement.world_size} ranks or for none, received {num_on_gpus} ranks on hosts "
            "that have enough; give --device cpu, or leave out the other hosts"
        )


def _is_its_own(placement: Placement, environ: Mapping[str, str]) -> bool:
    """Return whether Slurm has given this rank a GPU that no other rank sees."""
    if placement.launcher != "srun":
        return False
    binding = f"{environ.get('SLURM_GPU_BIND', '')} {environ.get('SLURM_TRES_BIND', '')}"
    return (
        bool({"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"} & set(environ))
        or environ.get("SLURM_NTASKS_PER_GPU") == "1"
        or any(word in binding for word in ("per_task:1", "single:1"))
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
