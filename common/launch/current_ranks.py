"""Rank and world size of a user's program, as the library that it has initialised counts them.

The variables of a launcher do not show ranks that a program has started itself (`torch.multiprocessing.spawn`), and
those of an elastic job stay as they were when its ranks change.
"""

import sys

from allstep.common.launch.placement import find_placement
from allstep.common.launch.unclaimed_ranks import check_alone, process_group


def current_ranks() -> tuple[int, int]:
    """Return rank and world size from the initialised library, or from the launcher if there is none yet.

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
