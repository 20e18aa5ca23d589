"""Prepares and opens the data set of a run, and checks it against the flags and this host's memory."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.base.memory import available_memory
from allstep.common.catalog.losses import check_loss
from allstep.common.cli.decode import check_decoding_device
from allstep.common.cli.validation import validate_for_data
from allstep.common.config.train_config import TrainConfig
from allstep.common.data import datasets
from allstep.common.data.curriculum import curriculum_of
from allstep.common.data.datasets import Dataset
from allstep.common.data.images.augmented_split import augmentation_of
from allstep.common.launch.placement import Placement, cores_per_rank
from allstep.common.recipe.schedule import Schedule


def open_dataset(
    config: TrainConfig, placement: Placement, own: Dataset | None, *, gpu: int | None, collectives: Collectives
) -> Dataset:
    """Prepare the data set on one rank of each host while the others wait, then open it on all ranks.

    Args:
        gpu: number of this rank's GPU, None for the CPU.
        own: data set passed by a user's program; replaces the one that a flag names.

    Raises:
        UserError: the data set is unavailable, cannot be decoded as requested, or has fewer samples than ranks.
    """
    if own is None:
        check_decoding_device(config.data.decode, gpu)
        if placement.local_rank == 0:
            datasets.prepare(config.data)
        collectives.barrier()
        decode_threads = config.data.decode_threads or cores_per_rank(placement)
        own = datasets.load(dataclasses.replace(config.data, decode_threads=decode_threads))
    validate_for_data(config, len(own.train), collectives.world_size)
    check_loss(config, own.task)
    return dataclasses.replace(
        own,
        curriculum=curriculum_of(config.data, len(own.train)),
        augmentation=augmentation_of(config.data, own),
    )


def check_batch_memory(schedule: Schedule, dataset: Dataset, placement: Placement) -> None:
    """Raise UserError if the inputs of a batch do not fit into this host's memory."""
    largest = schedule.global_batch_size * max([1, *(factor for _, factor in schedule.batch_ramp)])
    num_samples = -(-min(largest, len(dataset.train)) // placement.world_size)
    sample_bytes = math.prod(dataset.input_shape) * np.dtype(dataset.input_type).itemsize
    num_bytes = num_samples * sample_bytes * placement.local_size
    if num_bytes > (left := available_memory()):
        raise UserError(
            f"expected batches that fit into this host's memory, of which {left} bytes are left, received "
            f"{num_samples} samples of {sample_bytes} bytes for each of {placement.local_size} ranks; "
            "lower --global-batch-size or --batch-size"
        )
