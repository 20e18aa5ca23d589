"""Whether the flags of a run fit together, and the data."""

from __future__ import annotations

from collections.abc import Sequence

from allstep.common.config import TrainConfig
from allstep.common.errors import UserError

_STRATEGIES_OF_ONE = {
    **dict.fromkeys(("ddp", "fsdp", "data-parallel", "model-parallel"), "PyTorch"),
    **dict.fromkeys(("mirrored", "multi-worker-mirrored", "central-storage", "parameter-server"), "TensorFlow"),
}


def validate(config: TrainConfig, strategies: Sequence[str]) -> None:
    """Check what the types do not say.

    Raises:
        UserError: names the first wrong value.
    """
    schedule, optimizer = config.schedule, config.optimizer
    if config.strategy not in strategies:
        framework = _STRATEGIES_OF_ONE.get(config.strategy)
        hint = f", a strategy of {framework}: start {framework.lower()}/train.py for it" if framework else ""
        raise UserError(f"expected --strategy to be one of {', '.join(strategies)}, received {config.strategy}{hint}")
    if schedule.batch_size is not None and schedule.global_batch_size is not None:
        raise UserError("expected --batch-size (per rank) or --global-batch-size, received both; give one of them")
    for name, value, least in (
        ("--epochs", schedule.epochs, 1),
        ("--batch-size", schedule.batch_size, 1),
        ("--global-batch-size", schedule.global_batch_size, 1),
        ("--early-stop-patience", schedule.early_stop_patience, 0),
        ("--accumulate-steps", config.parallel.accumulate_steps, 1),
        ("--stages", config.parallel.stages, 1),
        ("--micro-batches", config.parallel.micro_batches, 1),
        ("--bucket-size", config.parallel.bucket_size, 0),
        ("--num-gpus", config.parallel.num_gpus, 1),
        ("--num-devices", config.parallel.num_devices, 1),
        ("--log-every", config.output.log_every, 0),
        ("--checkpoint-every", config.output.checkpoint_every, 0),
        ("--keep-checkpoints", config.output.keep_checkpoints, 1),
        ("--stall-timeout", config.faults.stall_timeout, 0),
        ("--fault-timeout", config.faults.fault_timeout, 3),
        ("--synthetic-samples", config.data.synthetic_samples, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"expected {name} to be at least {least}, received {value}")
    output = config.output
    if output.output_dir is None:
        for name, given in (
            ("--log-every", output.log_every),
            ("--tensorboard", output.tensorboard),
            ("--checkpoint-every", output.checkpoint_every),
        ):
            if given:
                raise UserError(f"expected --output-dir with {name}, received none; name a folder to write to")
    if output.resume and output.init_from:
        raise UserError("expected --resume or --init-from, received both; --resume takes the weights as well")
    if not 0 < schedule.base_lr < float("inf"):
        raise UserError(f"expected --base-lr to be a positive number, received {schedule.base_lr}")
    if not 0 <= optimizer.momentum < 1:
        raise UserError(f"expected --momentum in [0, 1), received {optimizer.momentum}")
    if not 0 <= optimizer.weight_decay < float("inf"):
        raise UserError(f"expected --weight-decay to be 0 or more, received {optimizer.weight_decay}")


def validate_for_data(config: TrainConfig, num_samples: int, world_size: int) -> None:
    """Check the configuration against the training samples.

    Raises:
        UserError: there are more ranks than samples, or a global batch does not fill the ranks.
    """
    global_batch_size = config.global_batch_size(world_size)
    if world_size > num_samples:
        raise UserError(
            f"expected at least one training sample per rank, received {num_samples} samples of "
            f"{config.data.dataset} for {world_size} ranks; start fewer ranks"
        )
    if global_batch_size < world_size:
        raise UserError(
            f"expected --global-batch-size to be at least the number of ranks, {world_size}, "
            f"received {global_batch_size}; give each rank a sample or start fewer ranks"
        )
