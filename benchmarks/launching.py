"""How a strategy is started by its usual launcher on a number of ranks of this host; on devices where it has those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

HOROVODRUN = ("horovodrun", "-np", "{ranks}", "python")
TORCHRUN = ("torchrun", "--nproc-per-node", "{ranks}")


@dataclass(frozen=True)
class Start:
    """What stands before and after `-m MODULE` on the command line."""

    program: tuple[str, ...] = ("python",)
    flags: tuple[str, ...] = ()
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
        "horovod": Start(HOROVODRUN, polls=True),
        "ddp": Start(TORCHRUN),
        "fsdp": Start(TORCHRUN),
        "data-parallel": Start(can_have=_one),  # it takes all GPUs; without any it runs on one device
        "model-parallel": Start(flags=("--stages", "{ranks}"), can_have=_several),
    },
    "tensorflow": {
        "single": Start(can_have=_one),
        "horovod": Start(HOROVODRUN, polls=True),
        "mirrored": Start(flags=("--num-devices", "{ranks}")),
        "multi-worker-mirrored": Start(HOROVODRUN),
        "central-storage": Start(flags=("--num-devices", "{ranks}")),
        "parameter-server": Start(HOROVODRUN, can_have=_several, synchronous=False),
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
    start = STARTS[framework][strategy]
    program, own_flags = ([part.format(ranks=num_ranks) for part in parts] for parts in (start.program, start.flags))
    module = module or f"allstep.{framework}.train"
    return [*program, "-m", module, "--strategy", strategy, *own_flags, *map(str, flags)]
