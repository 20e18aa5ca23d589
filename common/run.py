"""What both trainers do around the engine in the same way: open the data, choose the schedule, tell the start."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

from allstep.common import datasets, engine
from allstep.common.config import DEFAULT_BATCH_SIZE, TrainConfig, prepare_output_dir, validate_for_data
from allstep.common.datasets import Dataset
from allstep.common.launcher import Placement
from allstep.common.reporting import open_reporter
from allstep.common.schedule import Schedule
from allstep.common.worker import Collectives, Worker


def open_dataset(config: TrainConfig, place: Placement, collectives: Collectives) -> Dataset:
    """Put the data set in place, by one rank of each host while the others wait, and open it on all.

    Raises:
        UserError: the data set cannot be had, or has fewer samples than there are ranks.
    """
    if place.local_rank == 0:
        datasets.prepare(config.data)
    collectives.barrier()
    dataset = datasets.load(config.data)
    validate_for_data(config, len(dataset.train), place.world_size)
    return dataset


def make_schedule(config: TrainConfig, num_samples: int, world_size: int) -> Schedule:
    """The learning rate and batch size over the run.

    Raises:
        UserError: a flag of the schedule is wrong.
    """
    flags = config.schedule
    return Schedule(
        base_lr=flags.base_lr,
        samples_per_epoch=num_samples,
        num_epochs=flags.epochs,
        global_batch_size=config.global_batch_size(world_size),
        reference_batch_size=DEFAULT_BATCH_SIZE,
        scaling=flags.lr_scaling,
        warmup_epochs=flags.warmup_epochs,
        decay=flags.lr_decay,
    )


def train(worker: Worker, dataset: Dataset, config: TrainConfig, place: Placement) -> None:
    """Train as configured; rank 0 alone writes what is to be kept.

    Raises:
        UserError: the output directory cannot be written.
    """
    schedule = make_schedule(config, len(dataset.train), place.world_size)
    if config.output.output_dir and place.rank == 0:
        _start_output_dir(config.output.output_dir, config)
    reporter = open_reporter(config, place.rank)
    weights = worker.export_weights()
    reporter.event(
        "start",
        framework=worker.framework,
        strategy=config.strategy,
        launcher=place.launcher,
        world_size=place.world_size,
        versions={"python": platform.python_version(), **worker.versions()},
        global_batch_size=schedule.global_batch_size,
        parameter_count=sum(array.size for array in weights.values()),
        time=datetime.datetime.now(datetime.timezone.utc).isoformat(),
    )
    try:
        engine.fit(worker, dataset, schedule, reporter, seed=config.data.seed, log_every=config.output.log_every)
    finally:
        reporter.close()


def _start_output_dir(path: Path, config: TrainConfig) -> None:
    import yaml

    prepare_output_dir(path)
    (path / "metrics.jsonl").unlink(missing_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config.flat(), sort_keys=False))
