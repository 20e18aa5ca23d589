"""How a strategy is started by its usual launcher on a number of ranks of this host; on devices where it has those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Start:
    """How a strategy is started on this host."""

    launcher: str | None = None
    """One of LAUNCHERS; None where it starts its ranks, or takes its devices, by itself."""
    flags: tuple[str, ...] = ()
    """What it is told of their number."""
    can_have: Callable[[int], bool] = lambda num_ranks: num_ranks >= 1
    """Whether the strategy runs on so many ranks."""
    synchronous: bool = True
    """Whether its curve is that of `single`."""
    polls: bool = False
    """Whether its ranks take processor time while nothing is to be done."""


def _one(num_ranks: int) -> bool:
    return num_ranks == 1


def _several(num_ranks: int) -> bool:
    return num_ranks >= 2


STARTS = {
    "pytorch": {
        "single": Start(can_have=_one),
        "horovod": Start("horovodrun", polls=True),
        "ddp": Start("torchrun"),
        "fsdp": Start("torchrun"),
        "data-parallel": Start(can_have=_one),  # it takes all GPUs; without any it runs on one device
        "model-parallel": Start(flags=("--stages", "{ranks}"), can_have=_several),
    },
    "tensorflow": {
        "single": Start(can_have=_one),
        "horovod": Start("horovodrun", polls=True),
        "mirrored": Start(flags=("--num-devices", "{ranks}")),
        "multi-worker-mirrored": Start("horovodrun"),
        "central-storage": Start(flags=("--num-devices", "{ranks}")),
        "parameter-server": Start("horovodrun", can_have=_several, synchronous=False),
    },
}
FRAMEWORKS = tuple(STARTS)


def strategies(*, synchronous: bool = False) -> tuple[str, ...]:
    """The strategies of both frameworks, each name once; the synchronous ones alone where that is asked for."""
    starts = [item for of_framework in STARTS.values() for item in of_framework.items()]
    return tuple(dict.fromkeys(name for name, start in starts if start.synchronous or not synchronous))


def train_command(
    framework: str, strategy: str, num_ranks: int, flags: Sequence[object], *, module: str | None = None
) -> list[str]:
    """The command that trains by a strategy of STARTS[framework] on so many ranks, or on one rank's devices.

    Args:
        module: what to run in place of the framework's trainer, with the trainer's flags.
    """
    how = STARTS[framework][strategy]
    own_flags = (flag.format(ranks=num_ranks) for flag in how.flags)
    module = module or f"allstep.{framework}.train"
    return [*start(how.launcher, num_ranks), "-m", module, "--strategy", strategy, *own_flags, *map(str, flags)]
