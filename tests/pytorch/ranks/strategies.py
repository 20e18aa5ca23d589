"""Computation of each rank with options of one strategy, which the argument names; run by test_strategies.py.

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
from torch.utils.checkpoint import checkpoint

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import StrategyConfig
from allstep.common.data.loader import Batch, Slice
from allstep.common.data.sharding import Position
from allstep.common.launch.placement import find_placement
from allstep.pytorch.compat import without_compiler
from allstep.pytorch.passes import TrainPass
from allstep.pytorch.precision import Precision
from allstep.pytorch.slices import Slices

LEARNING_RATE, NUM_STEPS, NUM_SAMPLES = 0.1, 6, 15
PLACE = find_placement()
IMAGES = torch.randn(NUM_SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(NUM_SAMPLES) % 5
# The two ranks have different numbers of samples, 7 and 8.
OWN = slice(*(NUM_SAMPLES * number // PLACE.world_size for number in (PLACE.rank, PLACE.rank + 1)))


def network(*, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
    )


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="sum")


def optimizer(model: nn.Module, learning_rate: float = LEARNING_RATE) -> torch.optim.Optimizer:
    return without_compiler(torch.optim.SGD)(model.parameters(), lr=learning_rate, momentum=0.9)


def alone(
    model: nn.Module, learning_rate: float = LEARNING_RATE, num_micro_batches: int = 1, num_samples: int = NUM_SAMPLES
) -> dict[str, torch.Tensor]:
    """Return weights and buffers after training in one process, on micro-batches of each batch in sequence."""
    steps = optimizer(model, learning_rate)
    for _ in range(NUM_STEPS):
        steps.zero_grad()
        micro_batches = (all_of[:num_samples].chunk(num_micro_batches) for all_of in (IMAGES, LABELS))
        for images, labels in zip(*micro_batches, strict=True):
            (loss_sum(model(images), labels) / num_samples).backward()
        steps.step()
    return model.state_dict()


def together(strategy, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return weights and buffers after training on all ranks, each with its share of the samples."""
    wrapped, steps = strategy.wrap(model, optimizer(model))
    strategy.broadcast(wrapped, steps)
    one_pass = strategy.reduction.train_pass(TrainPass(wrapped, loss_sum))
    for _ in range(NUM_STEPS):
        steps.zero_grad()
        strategy.reduction.wait(one_pass(IMAGES[OWN], LABELS[OWN], PLACE.world_size / NUM_SAMPLES, is_last=True))
        steps.step()
    # All ranks have the same weights, even if the gradients were compressed.
    own = np.concatenate([parameter.detach().numpy().ravel() for parameter in model.parameters()]).view(np.int32)
    of_all = strategy.collectives.all_gather(own.astype(np.int64))
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
    # The oracle detects a run without the flag.
    assert apart(expected, together(strategy, network(batch_norm=True))) > 1e-3


def check_lossy(strategy, bound: float, **flags: str) -> None:
    """The result is close to the exact one but not equal to it, because gradients were compressed."""
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
    check_slices(strategy)


def check_small_first_bucket(strategy) -> None:
    """Without a bucket size, the first gradients of a backward pass are reduced while it computes the rest."""
    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(108, 64), nn.Linear(64, 5000)
    )  # 27 kB, and 1.3 MB with the first gradient
    wrapped, _ = strategy.wrap(wide, optimizer(wide))
    one_pass = strategy.reduction.train_pass(TrainPass(wrapped, loss_sum))
    for _ in range(5):  # the first passes find the order
        one_pass(IMAGES[OWN], LABELS[OWN], 1.0, is_last=True)
    assert len(wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) == 2


def check_horovod() -> None:
    from allstep.pytorch.strategies.horovod import Horovod

    strategy = Horovod(PLACE, StrategyConfig())
    strategy.init()
    assert apart(alone(network()), together(strategy, network())) < 1e-6
    # Adding the gradients of all ranks is the same as multiplying the learning rate by their number.
    expected = alone(network(), LEARNING_RATE * PLACE.world_size)
    assert apart(expected, together(with_flags(strategy, op="sum"), network())) < 1e-5
    check_lossy(strategy, 1e-2, compression="fp16")
    check_lossy(strategy, 1.0, op="adasum")
    check_batch_norm(strategy)
    check_slices(strategy)


def check_slices(strategy) -> None:
    """Summing the last layers' gradients begins before the first layer has any, unless the step is audited."""
    model = network()
    (loss_sum(model(IMAGES), LABELS) / NUM_SAMPLES).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    seen = sliced_gradients(strategy, model)
    assert seen == [0, 1, "first layer", 2], seen
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert sliced_gradients(strategy, model, audited=True) == ["first layer", "first layer", 0, 1, 2]
    try:
        sliced_gradients(strategy, TwiceTheSame())
    except UserError as error:
        assert "received another one" in str(error)
        strategy.collectives.barrier()  # a rank that exits first would end the other
    else:
        raise AssertionError("a gradient came too late, and nobody noticed")


def sliced_gradients(strategy, model: nn.Module, *, audited: bool = False) -> list[int | str]:
    """Compute gradients with one slice per rank and three buckets.

    Returns: the events in order: the number of each bucket whose sum begins, and "first layer" for its gradient.
    """
    strategy = with_flags(strategy, slices=PLACE.world_size, bucket_size=0.0005)
    strategy.wrap(model, optimizer(model))
    seen: list[int | str] = []
    begin = strategy.reduction.sum.begin
    strategy.reduction.sum.begin = lambda partial, number: seen.append(number) or begin(partial, number)
    hook = next(model.parameters()).register_hook(lambda _: seen.append("first layer"))

    def batch_of(rank: int) -> Batch:
        own = slice(*(NUM_SAMPLES * number // PLACE.world_size for number in (rank, rank + 1)))
        size = own.stop - own.start
        samples = IMAGES[own].numpy(), LABELS[own].numpy()
        return Batch(*samples, size, NUM_SAMPLES, 1 / NUM_SAMPLES, Position(0, 0), [Slice(rank, 0, size)])

    class Inputs:
        device = torch.device("cpu")

        def __call__(self, part: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.as_tensor(part.inputs), torch.as_tensor(part.targets)

    one_pass = strategy.reduction.train_pass(TrainPass(model, loss_sum))
    batch = dataclasses.replace(batch_of(PLACE.rank), read_slice_of=batch_of if audited else None)
    model.zero_grad()
    slices = Slices(strategy.reduction, one_pass, Inputs(), Precision(), (), strategy.collectives, seed=0)
    strategy.reduction.wait(slices(batch, 1.0, 0))
    hook.remove()
    return seen


class TwiceTheSame(nn.Module):
    """Network with a layer in two checkpointed passes, each of which gives the layer a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(108, 16), nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs.flatten(1))
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return hidden


def check_model_parallel() -> None:
    """For any number of samples in a batch, batch norm sees each sample once and no padding."""
    from allstep.pytorch.strategies.model_parallel import ModelParallel

    strategy = ModelParallel(PLACE, StrategyConfig(stages=PLACE.world_size, micro_batches=4))
    strategy.init()
    strategy.pin_device()
    for num_samples, num_micro_batches in ((12, 4), (15, 3), (7, 1), (1, 1)):
        model = network(batch_norm=True)
        stage, steps = strategy.wrap(model, optimizer(model))
        one_pass = strategy.reduction.train_pass(TrainPass(stage, loss_sum))
        for _ in range(NUM_STEPS):
            steps.zero_grad()
            one_pass(IMAGES[:num_samples], LABELS[:num_samples], 1 / num_samples, is_last=True)
            steps.step()
        of_stage = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
        received = strategy.gather(of_stage)
        if PLACE.rank == 0:
            expected = alone(network(batch_norm=True), num_micro_batches=num_micro_batches, num_samples=num_samples)
            received = {name: torch.as_tensor(received[name]) for name in expected}
            assert apart(expected, received) < 1e-5, (num_samples, apart(expected, received))


{"ddp": check_ddp, "horovod": check_horovod, "model-parallel": check_model_parallel}[sys.argv[1]]()
print("all right")
