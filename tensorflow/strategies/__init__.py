"""The strategies of TensorFlow by the names of `--strategy`; each is one class that spells out the five steps."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from allstep.common.base.checkout import extra_command, setup_command
from allstep.common.base.errors import UserError, summary
from allstep.common.catalog import strategies as registry
from allstep.common.cli.strategy_flags import check_flags, check_launcher_of_horovod, check_one_process
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch import tf_config
from allstep.common.launch.placement import Placement
from allstep.common.launch.unclaimed_ranks import check_alone
from allstep.common.launch.variables import check_variables
from allstep.common.process.lean_import import lean_import

if TYPE_CHECKING:
    from allstep.tensorflow.strategies.strategy import Strategy

STRATEGIES = tuple(registry.STRATEGIES["tensorflow"])


def check(config: TrainConfig, placement: Placement) -> None:
    """Refuse what the chosen strategy cannot do, before any rank spends time on importing TensorFlow.

    Raises UserError if the launcher or TF_CONFIG does not fit the strategy, or the strategy would ignore a flag.
    """
    check_flags(config, "tensorflow")
    check_variables(os.environ)
    name, given = config.strategy_name, os.environ.get("TF_CONFIG")
    one_process = registry.STRATEGIES["tensorflow"][name].one_process
    if name not in tf_config.ROLES or not given:
        check_alone(placement, chosen=one_process)
    if one_process:
        check_one_process(name, placement, instead="horovod or multi-worker-mirrored")
    if config.parallel.sync_batch_norm and config.parallel.compile:
        raise UserError(
            "expected --sync-batch-norm without --compile in TensorFlow, received both; XLA cannot ask the other ranks "
            "for their samples: leave one of them out"
        )
    if config.parallel.sync_batch_norm and config.parallel.accumulate_steps > 1 and name != "horovod":
        raise UserError(
            f"expected --accumulate-steps 1 for --sync-batch-norm with --strategy {name}, received "
            f"{config.parallel.accumulate_steps}: devices would meet within a loop, which TensorFlow cannot have; use "
            "horovod"
        )
    if config.parallel.compile and config.optimizer.gradient_noise:
        raise UserError(
            "expected --gradient-noise without --compile in TensorFlow, received both; XLA cannot ask the host for the "
            "noise: leave one of them out"
        )
    if name == "horovod":
        check_launcher_of_horovod(placement)
    if name in tf_config.ROLES and given:
        tf_config.find_placement(tf_config.parse(given, name), placement)
        return
    if name in tf_config.ROLES and placement.launcher == "torchrun":
        raise UserError(
            f"expected horovodrun, mpirun or srun for --strategy {name}, received torchrun; start it by "
            f"horovodrun -np {placement.world_size}"
        )
    if name == "parameter-server" and placement.world_size < 2:
        raise UserError(
            f"expected at least two processes for --strategy {name}, a chief and a worker, received one; "
            "start it as in horovodrun -np 3"
        )


def num_ranks_to_spawn(config: TrainConfig, placement: Placement) -> int:
    """Return 0: a process of TensorFlow drives all devices of its host, or a launcher starts its ranks."""
    return 0


def create(config: TrainConfig, placement: Placement) -> Strategy:
    """See `common.catalog.strategies.create`."""
    if config.strategy == "parameter-server":  # it watches its processes itself
        return registry.create("tensorflow", config, placement, fault_timeout=config.faults.fault_timeout)
    return registry.create("tensorflow", config, placement)


def availability(name: str) -> str | None:
    """Return why this machine cannot run the strategy of that name, or None if it can."""
    if importlib.util.find_spec("tensorflow") is None:
        return f"TensorFlow is not installed: run {extra_command('tensorflow')}"
    if name == "horovod":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        try:
            with lean_import():
                import horovod.tensorflow  # noqa: F401
        except ImportError as error:
            reason = summary(error)
            return f"Horovod is not installed, or not built for this TensorFlow: run {setup_command()} ({reason})"
    return None
