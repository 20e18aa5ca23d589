"""The strategies of PyTorch by the names of `--strategy`; each is one class that spells out the five steps."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.common.base.checkout import extra_command, setup_command
from allstep.common.base.errors import UserError, quote
from allstep.common.catalog import strategies as registry
from allstep.common.catalog.networks import max_stages
from allstep.common.cli.strategy_flags import check_flags, check_launcher_of_horovod, check_one_process, launcher_name
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import Placement
from allstep.common.launch.unclaimed_ranks import check_alone
from allstep.common.launch.variables import check_variables
from allstep.common.process.lean_import import uncollected

if TYPE_CHECKING:
    from allstep.pytorch.strategies.strategy import Strategy

STRATEGIES = tuple(registry.STRATEGIES["pytorch"])


def check(config: TrainConfig, placement: Placement) -> None:
    """Refuse what the chosen strategy cannot do, before any rank spends time on importing PyTorch.

    Raises UserError if the launcher cannot start the strategy, or the strategy would ignore a flag.
    """
    check_flags(config, "pytorch")
    check_variables(os.environ)
    _check_allocator()
    name, flags = config.strategy_name, config.parallel
    one_process = registry.STRATEGIES["pytorch"][name].one_process
    check_alone(placement, chosen=one_process or num_ranks_to_spawn(config, placement) > 0)
    if one_process:
        check_one_process(name, placement, instead="horovod or ddp")
    if name == "horovod":
        check_launcher_of_horovod(placement, instead="ddp")
    if config.precision == "fp16" and flags.op == "adasum":
        raise UserError(
            "expected another --precision for --op adasum, received fp16: each rank takes a step of its own, which "
            "Adasum adds to the others', before it is known whether any gradient overflows; use bf16"
        )
    if config.precision == "fp16" and flags.comm_hook == "powersgd":
        raise UserError(
            "expected another --precision for --comm-hook powersgd, received fp16: PowerSGD carries what it has not "
            "sent into the next step, an overflow as well; use bf16"
        )
    if flags.compile and shutil.which(compiler := os.environ.get("CXX") or "g++") is None:
        raise UserError(
            f"expected a C++ compiler, by which PyTorch builds its programs, with --compile, received no {compiler}; "
            "install one, name it in CXX, or leave --compile out"
        )
    num_stages = max_stages(config.model)
    if name == "model-parallel" and num_stages == 1:
        raise UserError(
            f"expected a network that is a sequence of layers for --strategy model-parallel, received --model "
            f"{config.model}; choose another model or strategy"
        )
    if name == "model-parallel" and flags.stages > num_stages:
        raise UserError(
            f"expected --stages to be at most {num_stages}, the layers with weights of --model {config.model}, "
            f"received {flags.stages}; give fewer stages"
        )
    if name == "model-parallel" and placement.launcher and flags.stages != placement.world_size:
        raise UserError(
            f"expected as many processes as --stages, {flags.stages}, received {placement.world_size} from "
            f"{launcher_name(placement)}; start {flags.stages} or give --stages {placement.world_size}"
        )
    if flags.num_gpus and placement.launcher not in (None, "allstep"):
        raise UserError(
            f"expected --num-gpus without a launcher, received {flags.num_gpus} under {launcher_name(placement)}, "
            "which has started every rank; leave one of them out"
        )


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_LOAD = "import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]"


def _check_allocator() -> None:
    """Refuse options of PyTorch's allocator that end a process as it loads PyTorch."""
    given = [name for name in _ALLOCATOR if os.environ.get(name)]
    if given and (torch := importlib.util.find_spec("torch")) and torch.origin:
        libraries = map(str, Path(torch.origin).parent.glob("lib/libc10*.so"))
        loading = subprocess.run([sys.executable, "-S", "-c", _LOAD, *libraries], capture_output=True)
        if loading.returncode == -signal.SIGABRT:
            options = " or ".join(f"{name}={quote(os.environ[name])}" for name in given)
            raise UserError(f"PyTorch cannot read {options}; correct or unset it")


def num_ranks_to_spawn(config: TrainConfig, placement: Placement) -> int:
    """Return the number of ranks that this process has to start on this host; 0 if it is a rank itself."""
    if placement.launcher:
        return 0
    entry = registry.STRATEGIES["pytorch"][config.strategy_name]
    by_flag = {"--num-gpus": config.parallel.num_gpus, "--stages": config.parallel.stages}
    wanted = by_flag.get(entry.num_ranks_flag or "")
    return wanted if entry.spawns and wanted and wanted > 1 else 0


def create(config: TrainConfig, placement: Placement) -> Strategy:
    """See `common.catalog.strategies.create`."""
    return registry.create("pytorch", config, placement)


def availability(name: str) -> str | None:
    """Return why this machine cannot run the strategy of that name, or None if it can."""
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch is not installed: run {extra_command('pytorch')}"
    if name == "horovod":
        try:
            with uncollected():
                import horovod.torch  # noqa: F401
        except ImportError as error:
            return f"Horovod is not installed, or not built for this PyTorch: run {setup_command()} ({error})"
    if name in ("ddp", "fsdp", "model-parallel"):
        with uncollected():
            import torch.distributed

        if not torch.distributed.is_available():
            return "this PyTorch was built without torch.distributed"
    return None
