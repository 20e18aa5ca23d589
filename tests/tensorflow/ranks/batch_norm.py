"""Batch norm when a global batch leaves rank 0 without samples; run on two ranks of Horovod by test_batch_norm.py.

Oracles: for the statistics of separate ranks, their mean; for --sync-batch-norm, the same samples in one process.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from allstep.common.config.train_config import OptimizerConfig, StrategyConfig, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position, rank_slice
from allstep.common.launch.placement import ALONE, Placement, find_placement
from allstep.tensorflow.networks.batch_norm import BatchNorm
from allstep.tensorflow.optimizers import build_optimizer
from allstep.tensorflow.strategies.horovod import Horovod
from allstep.tensorflow.strategies.strategy import Single, Strategy
from allstep.tensorflow.worker import Worker

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 6, 6, 1), dtype=np.uint8)
DATASET = Dataset(None, None, (6, 6, 1), 3, mean=(0.5,), std=(0.25,))
# The last one has a sample only for rank 1, so rank 0 pads its slice. With two passes, rank 1 also does in one pass.
GLOBAL_BATCHES = ((0, 4), (4, 6), (6, 7))


def batch(begin: int, end: int, placement: Placement) -> Batch:
    """Return a batch as the loader makes it."""
    first, after = rank_slice(begin, end, rank=placement.rank, world_size=placement.world_size)
    read = slice(first, max(after, first + 1))
    loss_weight = placement.world_size / (end - begin) if after > first else 0.0
    return Batch(IMAGES[read], np.arange(7)[read] % 3, after - first, end - begin, loss_weight, Position(0, end))


def make_worker(strategy: Strategy, num_passes: int) -> Worker:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((6, 6, 1)), layers.Conv2D(4, 3, name="conv"), BatchNorm(name="bn"),
                              layers.ReLU(), layers.Flatten(), layers.Dense(3, name="fc")])  # fmt: skip
    optimizer = build_optimizer(OptimizerConfig())
    optimizer.build(model.trainable_variables)
    model, optimizer = strategy.wrap(model, optimizer)
    strategy.broadcast(model, optimizer)
    config = TrainConfig(parallel=StrategyConfig(accumulate_steps=num_passes))
    return Worker(model, optimizer, config, strategy, "/CPU:0", DATASET)


def check_of_each_rank(strategy: Horovod, num_passes: int) -> None:
    worker = make_worker(strategy, num_passes)

    def statistics() -> np.ndarray:
        weights = worker.export_weights()
        return np.concatenate([weights["bn.running_mean"], weights["bn.running_var"]])

    history = [statistics()]
    for bounds in GLOBAL_BATCHES:
        worker.train_step(batch(*bounds, PLACE), 0.1)
        history.append(statistics())
    assert all((history[number] != history[number + 1]).all() for number in (0, 1))
    assert (history[-1] == history[-2]).all() == (PLACE.rank == 0)
    of_all = (
        strategy.collectives.all_gather(history[-1].view(np.int32).astype(np.int64)).astype(np.int32).view(np.float32)
    )
    assert (of_all[0] != of_all[1]).all()
    for _ in range(2):  # the second time changes nothing
        worker.average_statistics()
        np.testing.assert_array_equal(statistics(), of_all.astype(np.float64).mean(0).astype(np.float32))


def check_of_all_ranks(strategy: Horovod, num_passes: int) -> None:
    strategy.flags = StrategyConfig(sync_batch_norm=True)
    single = Single(ALONE, StrategyConfig())
    single.init()
    received, expected = make_worker(strategy, num_passes), make_worker(single, 1)
    for bounds in GLOBAL_BATCHES:
        received.train_step(batch(*bounds, PLACE), 0.1)
        expected.train_step(batch(*bounds, ALONE), 0.1)
    arrays = received.export_state()
    assert all(np.isfinite(array).all() for array in arrays.values())
    if num_passes == 1:  # with passes, each pass has separate statistics
        for name, array in expected.export_state().items():
            np.testing.assert_allclose(arrays[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


PLACE = find_placement()
horovod = Horovod(PLACE, StrategyConfig())
horovod.init()
check_of_each_rank(horovod, 1)
check_of_each_rank(horovod, 2)
check_of_all_ranks(horovod, 1)
check_of_all_ranks(horovod, 2)
print("all right")
