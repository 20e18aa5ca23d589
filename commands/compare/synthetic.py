"""Measure training speed on images that are made once and stay on the device: only computation and communication.

    horovodrun -np 4 python -m allstep.commands.compare.synthetic --framework pytorch --model resnet50 --batch-size 32
    python -m allstep.commands.compare.synthetic --framework tensorflow --model cnn --synthetic-shape 28 28 1

Prints images/s of every iteration of several batches and, at the end, their mean with its 95 % confidence interval, per
rank and over all ranks; the slowest rank counts. All flags of the trainers work as well, such as --strategy ddp,
--compression fp16 or --synthetic-classes 10. Defaults: resnet50, 224 x 224 x 3, 1,000 classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from allstep.commands.shared import rank, turns
from allstep.commands.shared.measure import estimate
from allstep.common.base.flag_types import Parser, whole
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.datasets.synthetic import MAX_SAMPLES
from allstep.common.data.loader import Batch, validation_batches
from allstep.common.process.exit import run_rank
from allstep.common.training.worker import Worker

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

# The maximum number of samples, enough for the batches of any number of ranks.
DEFAULTS = ("--dataset", "synthetic", "--synthetic-samples", str(MAX_SAMPLES), "--model", "resnet50")
IMAGENET = ("--synthetic-shape", "224", "224", "3", "--synthetic-classes", "1000")


def main(argv: Sequence[str] | None = None) -> None:
    """Train and print the speed."""
    parser = Parser("python -m allstep.commands.compare.synthetic", __doc__)
    rank.add_flags(parser)
    parser.add_argument("--num-warmup-batches", type=whole(1, 10**6), default=10, metavar="N", help="untimed batches")
    parser.add_argument("--num-batches-per-iter", type=whole(1, 10**6), default=10, metavar="N", help="timed together")
    parser.add_argument("--num-iters", type=whole(1, 10**6), default=10, metavar="N", help="timed iterations")
    flags, trainer_flags = parser.parse_known_args(argv)
    if session := rank.open_session(flags.framework, [*DEFAULTS, *IMAGENET, *trainer_flags]):
        measure(session, flags)


def measure(session: TrainingRun, flags: argparse.Namespace) -> None:
    """Train on one batch repeatedly, instead of `TrainingRun.train`."""
    worker, dataset, config, placement = session.worker, session.dataset, session.config, session.placement
    steps_in_flight = session.strategy.steps_in_flight
    print_once = functools.partial(print, flush=True) if placement.rank == 0 else lambda _: None
    batch = local_batch(dataset, config, worker)

    def steps(number: int) -> None:
        run_steps(worker, batch, number, learning_rate=config.schedule.base_lr, steps_in_flight=steps_in_flight)

    num_images = batch.num_global * flags.num_batches_per_iter
    print_once(
        f"{config.model}, {worker.framework}, {config.strategy}: {batch.num_global} images a step on "
        f"{placement.world_size} rank(s); {flags.num_warmup_batches} batches to warm up"
    )
    steps(1)
    first_step_at = time.time()
    steps(flags.num_warmup_batches - 1)
    wait_for_turn = turns.join(flags.turns, worker.collectives.world_size)
    energy_counter = rank.energy_counter(session)
    seconds, joules = [], []
    for number in range(flags.num_iters):
        wait_for_turn()
        energy, started = energy_counter(), time.perf_counter()
        steps(flags.num_batches_per_iter)
        seconds.append(time.perf_counter() - started)
        joules.append(energy_counter() - energy)
        print_once(f"Iter #{number}: {num_images / seconds[-1] / placement.world_size:.1f} img/sec per rank")
    wait_for_turn()
    blocks = rank.blocks(seconds, num_images, worker.collectives, joules=joules)
    rates = estimate([block.images_per_second for block in blocks])
    mean, half = rates.mean, rates.high - rates.mean
    print_once(f"Img/sec per rank: {mean / placement.world_size:.1f} +-{half / placement.world_size:.1f}")
    print_once(f"Total img/sec on {placement.world_size} rank(s): {mean:.1f} +-{half:.1f}")
    rank.write(flags, placement.rank, worker, blocks, first_step_at=first_step_at)


def run_steps(worker: Worker, batch: Batch, number: int, *, learning_rate: float, steps_in_flight: int) -> None:
    """Train as the engine does, reading a step's loss after the next steps have started, and finish all steps.

    The device is idle at the end.
    """
    unsettled = deque()
    for _ in range(number):
        unsettled.append(worker.train_step(batch, learning_rate))
        while len(unsettled) > steps_in_flight:
            float(unsettled.popleft())
    for loss_sum in unsettled:
        float(loss_sum)
    next(iter(worker.parameters()))  # a weight can be read once the last update is done


def local_batch(dataset: Dataset, config: TrainConfig, worker: Worker) -> Batch:
    """Return this rank's slice of the first global batch, on its device."""
    ranks = {"rank": worker.collectives.rank, "world_size": worker.collectives.world_size}
    num_global, num_slices = config.global_batch_size(ranks["world_size"]), config.parallel.num_slices
    batch = next(validation_batches(dataset.training_split, num_global, **ranks, num_slices=num_slices))
    inputs, targets = (_on_device(array, worker) for array in (batch.inputs, batch.targets))
    return dataclasses.replace(batch, inputs=inputs, targets=targets)


def _on_device(array: np.ndarray, worker: Worker) -> object:
    """Copy `array` to the device where the worker computes."""
    if worker.framework == "pytorch":
        import torch

        return torch.from_numpy(array).to(worker.device)
    import tensorflow as tf

    return tf.convert_to_tensor(array)


if __name__ == "__main__":
    run_rank(main)
