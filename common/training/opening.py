"""Prepares and opens the data set of a run, and checks it against the flags and this host's memory."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError, quote
from allstep.common.base.resources import available_memory
from allstep.common.catalog.losses import check_loss, metrics_of
from allstep.common.cli.validation import validate_for_data
from allstep.common.config.train_config import TrainConfig
from allstep.common.data import datasets
from allstep.common.data.classes import balanced_order_of, class_weights_of, tell_alike
from allstep.common.data.datasets import DataConfig
from allstep.common.data.datasets.base import Dataset, Split
from allstep.common.data.images.augmented_split import augmentation_of
from allstep.common.data.passed_over import tell
from allstep.common.data.sharding import curriculum_of
from allstep.common.launch.placement import Placement, cores_per_rank
from allstep.common.recipe.schedule import Schedule
from allstep.common.training.same_on_ranks import check_same_data


def open_dataset(
    config: TrainConfig, placement: Placement, own: Dataset | None, *, gpu: int | None, collectives: Collectives
) -> Dataset:
    """Prepare the data set on one rank of each host while the others wait, then open it on all ranks.

    Raises UserError if the data set is unavailable, cannot be decoded as requested, or has fewer samples than ranks.

    Args:
        gpu: number of this rank's GPU, None for the CPU.
        own: data set passed by a user's program; replaces the one that a flag names.
    """
    if own is None:
        if config.data.decode == "gpu" and gpu is None:
            raise UserError(
                "expected a GPU for each rank with --decode gpu, received ranks that train on the CPU; give --decode "
                "cpu"
            )
        if placement.local_rank == 0:
            with _memory_errors(config):
                datasets.prepare(config.data)
        collectives.barrier()
        with _memory_errors(config):
            own = datasets.load(data_flags(config, placement))
    check_same_data(own, collectives)
    validate_for_data(config, len(own.train), collectives.world_size)
    check_loss(config, own.task)
    tell_alike(own.class_names)
    if own.task == "classification" and own.num_classes == 1:
        tell(f"all samples of {quote(config.data.dataset)} have one class, so there is nothing to learn")
    if config.data.standardize:
        own = standardized(own, collectives)
    metrics_of(config, own)
    balanced = config.data.sampler == "balanced"
    return dataclasses.replace(
        own,
        sampler=balanced_order_of(own) if balanced else curriculum_of(config.data, len(own.train)),
        class_weights=class_weights_of(config.optimizer.class_weights, own),
        augmentation=augmentation_of(config.data, own),
    )


def data_flags(config: TrainConfig, placement: Placement) -> DataConfig:
    """Return the flags of the data set with what others decide: the task, by the loss, and the threads of a rank."""
    threads = config.data.decode_threads or cores_per_rank(placement)
    return dataclasses.replace(config.data, decode_threads=threads, task=config.data.task_with(config.loss))


def smallest_pass(config: TrainConfig, num_samples: int, world_size: int) -> int:
    """Return the smallest number of samples with which a rank runs the network in training.

    A rank whose part of a batch is empty runs it on one sample that does not count.
    """
    size, parallel = config.global_batch_size(world_size), config.parallel
    sizes = {min(size, num_samples)}
    if not config.schedule.drop_last:
        sizes.add(num_samples % size or size)
    parts = parallel.num_slices or world_size * parallel.accumulate_steps
    return max(1, min(sizes) // parts)


@contextlib.contextmanager
def _memory_errors(config: TrainConfig) -> Iterator[None]:
    """Name the data set that does not fit into memory."""
    try:
        yield
    except MemoryError as error:
        raise UserError(
            f"{quote(config.data.dataset)} does not fit into the memory of this host, of which {available_memory()} "
            "bytes are left; train on less of it, or on a host with more"
        ) from error


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


_NUM_PARTS = 64
"""Parts of the samples with sums of their own, each computed by one rank, so that no bit depends on the ranks."""
_READ_AT_ONCE = 4096


def standardized(dataset: Dataset, collectives: Collectives) -> Dataset:
    """Return the data set scaled by the mean and deviation of its training samples, of each field (the last axis).

    Both are those of scikit-learn's StandardScaler; a field that is constant keeps its scale. Collective: each rank
    reads a share of the samples. Raises UserError if the inputs are images or tokens.
    """
    if dataset.input_type == "int64" or (dataset.input_type == "uint8" and len(dataset.input_shape) == 3):
        received = "tokens, which are integers" if dataset.input_type == "int64" else "images"
        raise UserError(f"--standardize needs inputs that are numbers, received {received}; leave it out")
    num_samples, width = len(dataset.train), dataset.input_shape[-1]
    # A row has the number of values of a part, their mean, and the sum of squared differences from it.
    rows = np.zeros((_NUM_PARTS, 3, width))
    for part in range(collectives.rank, _NUM_PARTS, collectives.world_size):
        bounds = num_samples * part // _NUM_PARTS, num_samples * (part + 1) // _NUM_PARTS
        for begin in range(*bounds, _READ_AT_ONCE):
            values = _values(dataset.train, begin, min(begin + _READ_AT_ONCE, bounds[1]), width)
            mean = values.mean(axis=0)
            rows[part] = _merged(
                rows[part], np.stack([np.full(width, len(values)), mean, ((values - mean) ** 2).sum(0)])
            )
    rows = collectives.all_reduce_sum(rows.ravel()).reshape(rows.shape)
    total = np.zeros((3, width))
    for row in rows:
        total = _merged(total, row)
    count, mean, squares = total
    deviation = np.sqrt(squares / count)
    # As in StandardScaler, a difference that rounding may have made is none.
    epsilon = np.finfo(np.float64).eps
    deviation[deviation**2 <= count * epsilon * deviation**2 + (count * mean * epsilon) ** 2] = 1.0
    unit = 255.0 if dataset.input_type == "uint8" else 1.0
    scale = {"mean": tuple((mean / unit).tolist()), "std": tuple((deviation / unit).tolist())}
    return dataclasses.replace(dataset, **scale)


def _values(split: Split, begin: int, end: int, width: int) -> np.ndarray:
    inputs, _ = split.read(np.arange(begin, end), epoch=0)
    return inputs.reshape(-1, width).astype(np.float64)


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the row of two parts together (Chan et al. 1983, "Algorithms for Computing the Sample Variance")."""
    count = one[0] + other[0]
    if not count.any():
        return one
    apart, share = other[1] - one[1], other[0] / count
    return np.stack([count, one[1] + apart * share, one[2] + other[2] + apart**2 * one[0] * share])
