"""Checks of flags, launchers and versions, and settings of Horovod, that the strategies of both frameworks share."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence

from allstep.common.base.errors import Fault, UserError
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import check_model
from allstep.common.catalog.strategies import STRATEGIES, TITLES
from allstep.common.config.train_config import StrategyConfig, TrainConfig
from allstep.common.launch.placement import BY_HAND, Placement


def many_gradients(names: Sequence[str]) -> str:
    """Describe gradients, for the report of what a rank waits for."""
    return f"{len(names)} gradients, from {names[0]} to {names[-1]}"


SUM_OF_SLICES = "the sum of the slices' gradients"
"""Description, with --slices, of what ranks wait for."""


def check_flags(config: TrainConfig, framework: str) -> None:
    """Refuse flags that the framework or the chosen strategy would ignore, and a network of the other framework.

    The message names the flag and the strategies that use it.
    """
    check_model(config.model, framework)
    check_decode(config, framework)
    user_file.check(config.loss or "", "--loss")
    for item in dataclasses.fields(StrategyConfig):
        value = getattr(config.parallel, item.name)
        names = [name for name, entry in STRATEGIES[framework].items() if item.name in entry.flags]
        if value != item.default and config.strategy not in names:
            [other] = (title for name, title in TITLES.items() if name != framework)
            placement = f"--strategy {' or '.join(names)}" if names else other
            chosen = STRATEGIES[framework].get(config.strategy or "")
            why = chosen.why_not_compiled if chosen and item.name == "compile" else ""
            raise UserError(
                f"expected --{item.name.replace('_', '-')} with {placement} alone, received {value} with --strategy "
                f"{config.strategy} in {TITLES[framework]}{why and ', ' + why}; leave it out"
            )


def launcher_name(placement: Placement) -> str:
    """Return the name of the launcher, or of the variables that stand for one, for messages."""
    return "RANK and WORLD_SIZE" if placement.launcher == BY_HAND else placement.launcher or "no launcher"


def check_one_process(name: str, placement: Placement, *, instead: str) -> None:
    """Refuse several ranks for a strategy of one process; the message recommends the strategies `instead`."""
    if placement.world_size > 1:
        raise UserError(
            f"expected one process for --strategy {name}, received {placement.world_size} from "
            f"{launcher_name(placement)}; they would train {placement.world_size} times independently: use --strategy "
            f"{instead}, or start one process"
        )


_COMMUNICATION_VARIABLES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")


def check_launcher_of_horovod(placement: Placement, *, user: str = "--strategy horovod", instead: str = "") -> None:
    """Refuse ranks from a launcher unknown to Horovod: each rank would train as the only one, or abort.

    `user` is the flag or feature that needs Horovod; the message recommends horovodrun, and the strategy `instead`.
    """
    if placement.launcher in ("torchrun", BY_HAND):
        raise UserError(
            f"expected horovodrun, mpirun or srun for {user}, received {launcher_name(placement)}; start it by "
            f"horovodrun -np {placement.world_size}{f', or give --strategy {instead}' if instead else ''}"
        )
    # Variables of srun that MPI libraries read; Cray's reads PALS_*.
    if placement.launcher == "srun" and not any(name.startswith(("PMI", "PALS_")) for name in os.environ):
        raise UserError(
            f"expected srun --mpi=pmix for {user}, received srun that says nothing to MPI; start it by that, or by "
            f"mpirun in the allocation{f', or give --strategy {instead}' if instead else ''}"
        )
    for name in _COMMUNICATION_VARIABLES:  # Gloo has no rendezvous there
        if placement.launcher in ("mpirun", "srun") and os.environ.get(name, "").lower() == "gloo":
            raise UserError(
                f"expected {name} to be mpi under {launcher_name(placement)}, received gloo; unset it, or start it by "
                "horovodrun --gloo"
            )


def print_strategies(names: Sequence[str], availability: Callable[[str], str | None], placement: Placement) -> None:
    """Print each strategy and whether this machine can run it, for --list-strategies, on rank 0.

    `availability` returns why this machine cannot run the named strategy, or None if it can.
    """
    if placement.rank:
        return
    width = max(map(len, names))
    for name in names:
        reason = availability(name)
        print(f"{name:{width}}  {'available' if reason is None else f'not available: {reason}'}")


# With Horovod's default of 128 MiB, every gradient is copied into a buffer and out of it. That is cheap on a GPU, but
# takes a CPU longer than MPI takes for the sum: 1.5 of 46 ms per step of the CNN of `benchmarks/overhead.py`.
FUSION_THRESHOLD_ON_CPU = 2**20


def use_gloo_alone(placement: Placement) -> None:
    """Make Horovod communicate by Gloo in a process without a launcher, which has no MPI job to join."""
    if placement.launcher is None:
        os.environ.update(dict.fromkeys(_COMMUNICATION_VARIABLES, "gloo"))


def configure_horovod(placement: Placement, flags: StrategyConfig, *, on_gpu: bool) -> None:
    """Set the environment variables that the job and its flags need; Horovod reads them when it is initialised."""
    use_gloo_alone(placement)
    if flags.autotune:
        os.environ["HOROVOD_AUTOTUNE"] = "1"
    elif not on_gpu:
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_THRESHOLD_ON_CPU))
    if flags.timeline:
        os.environ["HOROVOD_TIMELINE"] = str(flags.timeline)
        with contextlib.suppress(OSError):
            flags.timeline.absolute().parent.mkdir(parents=True, exist_ok=True)
    timeline = os.environ.get("HOROVOD_TIMELINE") or "DYNAMIC"  # DYNAMIC is no file: a call starts that timeline
    if placement.rank == 0 and timeline != "DYNAMIC":
        try:  # Horovod ignores this error silently
            os.close(os.open(timeline, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        except OSError as error:
            raise UserError(
                f"expected a file to write for Horovod's timeline, received {timeline}: {error.strerror}; "
                "name another by --timeline or HOROVOD_TIMELINE"
            ) from None


def check_horovod(placement: Placement, op: str, *, size: int, mpi_enabled: bool) -> None:
    """Refuse an initialised Horovod that does not fit the job; `size` and `mpi_enabled` are what it returns.

    Raises Fault if the launcher started another number of ranks than Horovod sees, UserError if adasum cannot run on
    this number of ranks, or without MPI.
    """
    if size != placement.world_size:
        raise Fault(
            f"{placement.launcher or 'no launcher'} says {placement.world_size} ranks, Horovod sees {size}; they would "
            "train independently: start the job by horovodrun, or by the mpirun of this environment"
        )
    if op == "adasum" and (not mpi_enabled or size & (size - 1)):
        raise UserError(
            f"expected a power of two of ranks under MPI for --op adasum, received {size} under "
            f"{'MPI' if mpi_enabled else 'Gloo'}; use horovodrun --mpi with 2, 4, 8... ranks"
        )


def check_decode(config: TrainConfig, framework: str) -> None:
    """Refuse --decode gpu if another flag, which the message names, rules out decoding on a GPU."""
    data = config.data
    if data.decode != "gpu":
        return
    if framework == "tensorflow":
        raise UserError(
            "expected --decode cpu in TensorFlow, which has no decoder of JPEG files on GPUs, received gpu; leave it "
            "out, or train with PyTorch"
        )
    if data.dataset != "image-folder":
        raise UserError(f"expected --dataset image-folder with --decode gpu, received {data.dataset}; leave one out")
    if config.device == "cpu":
        raise UserError("expected --device auto or cuda with --decode gpu, received cpu; leave one of them out")
    for name in ("mixup", "cutmix", "random_erasing", "rand_augment"):  # augmentations of pixels on the CPU
        if value := getattr(data, name):
            raise UserError(
                f"expected --decode cpu with --{name.replace('_', '-')}, which changes images on the CPU, received gpu "
                f"and {value}; leave one of them out"
            )
