"""What each rank computes under the options of one strategy, named as the argument; run by test_strategies.py.

Oracle: the same network in one process with the samples of all ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from allstep.common.config import StrategyConfig
from allstep.common.launcher import placement

LEARNING_RATE, NUM_STEPS, NUM_SAMPLES = 0.1, 6, 15
PLACE = placement()
IMAGES = torch.randn(NUM_SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(NUM_SAMPLES) % 5
# 7 and 8 samples: no two ranks have equally many.
OWN = slice(*(NUM_SAMPLES * number // PLACE.world_size for number in (PLACE.rank, PLACE.rank + 1)))


def network(*, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
    )


def optimizer(model: nn.Module, learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)


def alone(
    model: nn.Module, learning_rate: float = LEARNING_RATE, num_portions: int = 1, num_samples: int = NUM_SAMPLES
) -> dict[str, torch.Tensor]:
    """Weights and buffers after training in one process, on equal portions of each batch one after the other."""
    steps = optimizer(model, learning_rate)
    for _ in range(NUM_STEPS):
        steps.zero_grad()
        portions = (all_of[:num_samples].chunk(num_portions) for all_of in (IMAGES, LABELS))
        for images, labels in zip(*portions, strict=True):
            (cross_entropy(model(images), labels, reduction="sum") / num_samples).backward()
        steps.step()
    return model.state_dict()


def together(strategy, model: nn.Module) -> dict[str, torch.Tensor]:
    """The same by all ranks, each with its own samples."""
    wrapped, steps = strategy.wrap(model, optimizer(model))
    strategy.broadcast(wrapped, steps)
    for _ in range(NUM_STEPS):
        steps.zero_grad()
        strategy.forward_backward(wrapped, IMAGES[OWN], LABELS[OWN], PLACE.world_size / NUM_SAMPLES)
        steps.step()
    # Whatever the gradients went through, the ranks have the same weights.
    own = np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()]).view(np.int32)
    of_all = strategy.all_gather(own.astype(np.int64))
    assert (of_all == of_all[0]).all()
    return model.state_dict()


def apart(reference: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert list(reference) == list(other)
    return max(float((reference[name] - other[name]).abs().max() / reference[name].abs().max()) for name in reference)


def with_flags(strategy, **flags):
    changed = copy.copy(strategy)
    changed.flags = dataclasses.replace(StrategyConfig(), **flags)
    return changed


def check_batch_norm(strategy) -> None:
    expected = alone(network(batch_norm=True))
    assert apart(expected, together(with_flags(strategy, sync_batch_norm=True), network(batch_norm=True))) < 1e-5
    # The oracle sees the difference that the flag makes.
    assert apart(expected, together(strategy, network(batch_norm=True))) > 1e-3


def check_lossy(strategy, bound: float, **flags: str) -> None:
    """Near the exact result, and not equal to it: something was left out on the way."""
    assert 1e-7 < apart(alone(network()), together(with_flags(strategy, **flags), network())) < bound, flags


def check_ddp() -> None:
    from allstep.pytorch.strategies.ddp import DDP

    strategy = DDP(PLACE, StrategyConfig())
    strategy.init()
    assert apart(alone(network()), together(strategy, network())) < 1e-6
    assert apart(alone(network()), together(with_flags(strategy, bucket_size=0.001), network())) < 1e-6
    check_small_first_bucket(strategy)
    check_lossy(strategy, 1e-2, comm_hook="fp16")
    check_lossy(strategy, 1e-1, comm_hook="bf16")
    check_lossy(strategy, 1.0, comm_hook="powersgd")
    check_batch_norm(strategy)


def check_small_first_bucket(strategy) -> None:
    """What comes first in a backward pass is reduced beside the rest of it, where no size of buckets is given."""
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(108, 64), nn.Linear(64, 5000)
    )  # 27 kB; 1.3 MB, whose gradient is first
    wrapped, steps = strategy.wrap(wide, optimizer(wide))
    for _ in range(5):  # the first passes find the order
        strategy.forward_backward(wrapped, IMAGES[OWN], LABELS[OWN], 1.0)
    assert len(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) == 2


def check_horovod() -> None:
    from allstep.pytorch.strategies.horovod import Horovod

    strategy = Horovod(PLACE, StrategyConfig())
    strategy.init()
    assert apart(alone(network()), together(strategy, network())) < 1e-6
    # The gradients of all ranks added up: the learning rate counts once for each.
    expected = alone(network(), LEARNING_RATE * PLACE.world_size)
    assert apart(expected, together(with_flags(strategy, op="sum"), network())) < 1e-5
    check_lossy(strategy, 1e-2, compression="fp16")
    check_lossy(strategy, 1.0, op="adasum")
    check_batch_norm(strategy)


def check_model_parallel() -> None:
    """Whatever number of samples a batch has, batch norm sees each once and nothing else."""
    from allstep.pytorch.strategies.model_parallel import ModelParallel

    strategy = ModelParallel(PLACE, StrategyConfig(stages=PLACE.world_size, micro_batches=4))
    strategy.init()
    for num_samples, num_portions in ((12, 4), (15, 3), (7, 1), (1, 1)):
        model = network(batch_norm=True)
        strategy.put(model, torch.device("cpu"))
        stage, steps = strategy.wrap(model, optimizer(model))
        for _ in range(NUM_STEPS):
            steps.zero_grad()
            strategy.forward_backward(stage, IMAGES[:num_samples], LABELS[:num_samples], 1 / num_samples)
            steps.step()
        of_stage = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        received = strategy.gather(of_stage)
        if PLACE.rank == 0:
            expected = alone(network(batch_norm=True), num_portions=num_portions, num_samples=num_samples)
            received = {name: torch.as_tensor(received[name]) for name in expected}
            assert apart(expected, received) < 1e-5, (num_samples, apart(expected, received))


{"ddp": check_ddp, "horovod": check_horovod, "model-parallel": check_model_parallel}[sys.argv[1]]()
print("all right")
