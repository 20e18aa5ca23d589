"""How a strategy is started by its usual launcher on a number of ranks of this host; on devices where it has those."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.common.catalog.strategies import STRATEGIES

LAUNCHERS = {
    "horovodrun": ("horovodrun", "-np", "{ranks}", "python"),
    # What was found out about hosts an hour ago does not matter to ranks of this one.
    "horovodrun-mpi": ("horovodrun", "--mpi", "--disable-cache", "-np", "{ranks}", "python"),
    "horovodrun-gloo": ("horovodrun", "--gloo", "--disable-cache", "-np", "{ranks}", "python"),
    # Ranks that fill the host are not refused.
    "mpirun": ("mpirun", "--bind-to", "none", "--oversubscribe", "-np", "{ranks}", "python"),
    "mpiexec": ("mpiexec", "-n", "{ranks}", "python"),
    # At a port that is free.
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "{ranks}"),
    "srun": ("srun", "-n", "{ranks}", "python"),
}
"""What stands in front of a Python program's arguments to start it on ranks of this host."""


def start(launcher: str | None, num_ranks: int | None = 1) -> list[str]:
    """The words of LAUNCHERS for so many ranks; `python` without a launcher."""
    return [word.format(ranks=num_ranks) for word in LAUNCHERS[launcher]] if launcher else ["python"]


def train_command(
    framework: str, strategy: str, num_ranks: int, flags: Sequence[object], *, module: str | None = None
) -> list[str]:
    """The command that trains by a strategy on so many ranks, or on one rank's devices.

    Args:
        module: what to run in place of the framework's trainer, with the trainer's flags.
    """
    entry = STRATEGIES[framework][strategy]
    # A launcher has the number already.
    given_flags = () if entry.launcher or not entry.num_ranks_flag else (entry.num_ranks_flag, num_ranks)
    module = module or f"allstep.{framework}.train"
    words = (*start(entry.launcher, num_ranks), "-m", module, "--strategy", strategy, *given_flags, *flags)
    return list(map(str, words))
