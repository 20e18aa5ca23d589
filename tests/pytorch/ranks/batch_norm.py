"""Batch norm when a global batch leaves rank 0 without samples; run on two ranks of Horovod by test_batch_norm.py.

Oracle: the same samples in one process; for the statistics of separate ranks, their mean.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from allstep.common.config.train_config import StrategyConfig, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position, rank_slice
from allstep.common.launch.placement import ALONE, Placement, find_placement
from allstep.pytorch.compat import without_compiler
from allstep.pytorch.strategies.horovod import Horovod
from allstep.pytorch.strategies.strategy import Single, Strategy
from allstep.pytorch.worker import Worker

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 6, 6, 1), dtype=np.uint8)
DATASET = Dataset(None, None, (6, 6, 1), 3, mean=(0.5,), std=(0.25,))
# The last one has a sample only for rank 1, so rank 0 pads its slice. With two passes, one has no samples on any rank.
GLOBAL_BATCHES = ((0, 4), (4, 6), (6, 7))


def batch(begin: int, end: int, rank: int, world_size: int) -> Batch:
    """Return a batch as the loader makes it."""
    first, after = rank_slice(begin, end, rank=rank, world_size=world_size)
    read = slice(first, max(after, first + 1)) if first < 7 else slice(0, 1)
    loss_weight = world_size / (end - begin) if after > first else 0.0
    labels = np.arange(7)[read] % 3
    return Batch(IMAGES[read], labels, after - first, end - begin, loss_weight, Position(0, end))


def trained(
    strategy: Strategy, placement: Placement, num_passes: int, *, num_norms: int = 1
) -> tuple[Worker, nn.Module, list[np.ndarray]]:
    """Train on all batches; return the worker, its network, and its statistics after each batch."""
    torch.manual_seed(0)
    norms = [layer for _ in range(num_norms - 1) for layer in (nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))]
    network = nn.Sequential(*(nn.Conv2d(1, 4, 3), *norms, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            layer.num_batches_tracked = None
    optimizer = without_compiler(torch.optim.SGD)(network.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = strategy.wrap(network, optimizer)
    strategy.broadcast(model, optimizer)
    config = TrainConfig(parallel=StrategyConfig(accumulate_steps=num_passes))
    worker = Worker(network, optimizer, config, strategy, torch.device("cpu"), DATASET)
    statistics = []
    for bounds in GLOBAL_BATCHES:
        worker.train_step(batch(*bounds, placement.rank, placement.world_size), 0.1)
        statistics.append(np.concatenate([buffer.numpy() for buffer in network.buffers()]))
    return worker, network, statistics


def check_of_each_rank(strategy: Horovod) -> None:
    worker, network, [first, before, own] = trained(strategy, PLACE, 1)
    assert (first != before).all() and (own == before).all() == (PLACE.rank == 0)
    of_all = strategy.collectives.all_gather(own.view(np.int32).astype(np.int64)).astype(np.int32).view(np.float32)
    assert (of_all[0] != of_all[1]).all()
    for _ in range(2):  # the second time changes nothing
        worker.average_statistics()
        averaged = np.concatenate([buffer.numpy() for buffer in network.buffers()])
        np.testing.assert_array_equal(averaged, of_all.astype(np.float64).mean(0).astype(np.float32))


def check_of_all_ranks(strategy: Horovod, num_passes: int, *, num_norms: int = 1) -> None:
    strategy.flags = dataclasses.replace(StrategyConfig(), sync_batch_norm=True, accumulate_steps=num_passes)
    received = trained(strategy, PLACE, num_passes, num_norms=num_norms)[0].export_state()
    assert all(np.isfinite(array).all() for array in received.values())
    if PLACE.rank == 0 and num_passes == 1:  # with passes, each pass has separate statistics
        single = Single(ALONE, StrategyConfig())
        single.init()
        expected = trained(single, ALONE, 1)[0].export_state()
        for name, array in expected.items():
            np.testing.assert_allclose(received[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


PLACE = find_placement()
horovod = Horovod(PLACE, StrategyConfig())
horovod.init()
check_of_each_rank(horovod)
check_of_all_ranks(horovod, 1)
check_of_all_ranks(horovod, 2)
check_of_all_ranks(horovod, 2, num_norms=20)  # values stay finite in the pass without samples
print("all right")
