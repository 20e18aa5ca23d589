"""Commands that start a strategy with its usual launcher, on ranks or devices of this host."""

from collections.abc import Sequence

from allstep.common.catalog.strategies import STRATEGIES

LAUNCHERS = {
    "horovodrun": ("horovodrun", "-np", "{ranks}", "python"),
    # Without --disable-cache, horovodrun reuses checks of hosts from the last hour.
    "horovodrun-mpi": ("horovodrun", "--mpi", "--disable-cache", "-np", "{ranks}", "python"),
    "horovodrun-gloo": ("horovodrun", "--gloo", "--disable-cache", "-np", "{ranks}", "python"),
    # Without --oversubscribe, mpirun refuses more ranks than it counts cores.
    "mpirun": ("mpirun", "--bind-to", "none", "--oversubscribe", "-np", "{ranks}", "python"),
    "mpiexec": ("mpiexec", "-n", "{ranks}", "python"),
    # --standalone picks a free port.
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "{ranks}"),
    "srun": ("srun", "-n", "{ranks}", "python"),
}
"""Words in front of a Python program's arguments that start it on ranks of this host."""


def start(launcher: str | None, num_ranks: int | None = 1) -> list[str]:
    """Return the words of a launcher for `num_ranks` ranks; `python` without a launcher."""
    return [word.format(ranks=num_ranks) for word in LAUNCHERS[launcher]] if launcher else ["python"]


def train_command(
    framework: str, strategy: str, num_ranks: int, flags: Sequence[object], *, module: str | None = None
) -> list[str]:
    """Return the command that trains with a strategy on `num_ranks` ranks, or on as many devices of one rank.

    `module` runs instead of the framework's trainer, with the trainer's flags.
    """
    entry = STRATEGIES[framework][strategy]
    # A launcher already gets the number of ranks.
    given_flags = () if entry.launcher or not entry.num_ranks_flag else (entry.num_ranks_flag, num_ranks)
    module = module or f"allstep.{framework}.train"
    words = (*start(entry.launcher, num_ranks), "-m", module, "--strategy", strategy, *given_flags, *flags)
    return list(map(str, words))
