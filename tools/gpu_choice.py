"""Choice whether `make setup` builds for GPUs, by the user's request, the existing .venv, and this machine."""

from dataclasses import dataclass

import this_checkout  # noqa: F401  # first: makes allstep.* importable

from allstep.commands.horovod.prerequisites import OLDEST_DRIVER, Driver
from allstep.common.base.errors import UserError


@dataclass(frozen=True)
class Choice:
    """Whether the environment is built for GPUs, and the reason, in words that follow "for GPUs" or "for CPUs"."""

    gpu: bool
    reason: str


def choose(asked: str, *, before: bool | None, driver: Driver) -> Choice:
    """Choose GPUs or CPUs: as requested, else as in the existing .venv, else GPUs if there is a driver.

    Args:
        asked: the variable GPU of `make setup`: "0", "1", or "" if it was not given.
        before: the choice of the last set-up, None if there was none.

    Raises:
        UserError: GPU has another value.
    """
    if asked not in ("", "0", "1"):
        raise UserError(f"expected GPU to be 1 (Horovod with NCCL) or 0 (without), received {asked!r}; correct it")
    if asked:
        return Choice(asked == "1", f"GPU={asked} says so")
    if before is not None:
        other = " (make setup GPU=1 builds for the GPUs here)" if driver.works and not before else ""
        return Choice(before, f"as the last set-up did{other}")
    if driver.works:
        return Choice(True, "NVIDIA's driver is here (make setup GPU=0 builds for CPUs)")
    if driver.found:
        return Choice(False, f"the driver is {driver.version}, and CUDA 13 needs {OLDEST_DRIVER} or newer")
    return Choice(False, "no driver of NVIDIA's is here (make setup GPU=1 builds for GPUs elsewhere)")
