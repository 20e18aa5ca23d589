"""Check the gradients of `horovod_reduction.Sums` against averages by hand; run on two Horovod ranks."""

from __future__ import annotations

import dataclasses

import horovod.torch as hvd
import torch

from allstep.common.config.train_config import StrategyConfig
from allstep.pytorch.strategies.horovod_reduction import Sums


class Network(torch.nn.Module):
    """Weights of all kinds: large, small, sparse, complex, channels last, in float64, on one rank, unused, frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = torch.nn.Parameter(torch.randn(600, 500))
        self.small = torch.nn.ParameterList(torch.randn(size) for size in (1, 7, 16, 30))
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.rows = torch.nn.Embedding(9, 3, sparse=True)
        self.pairs = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.picture = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.double_one = torch.nn.Parameter(torch.randn(11, dtype=torch.float64))
        self.first_rank, self.unused, self.frozen = (torch.nn.Parameter(torch.randn(4)) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        used = [self.large, *self.small, self.scalar, self.rows(torch.tensor([hvd.rank(), 5, 5]))]
        used += [self.picture, self.double_one, self.frozen] + [self.first_rank] * (hvd.rank() == 0)
        loss = sum((one.float() ** 2).sum() for one in used) + (self.pairs * self.pairs.conj()).real.sum()
        return loss * scale


def by_hand(network: Network, scale: torch.Tensor, num_passes: int) -> dict[str, torch.Tensor | None]:
    """Return the averages over ranks of what backward makes of a copy of the network."""
    for _ in range(num_passes):
        network(scale).backward()
    averages: dict[str, torch.Tensor | None] = {}
    for name, parameter in network.named_parameters():
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        parts = torch.view_as_real(own) if own.is_complex() else own
        average = hvd.allreduce(parts.float().contiguous(), op=hvd.Average, name=name)
        is_there = name not in ("unused", "frozen") or (name == "frozen" and parameter.requires_grad)
        averages[name] = average.to(parts.dtype) if is_there else None
    return averages


def check(flags: StrategyConfig, *, unfreezes: bool) -> None:
    network, copy, scale = Network(), Network(), torch.tensor(1.0 + hvd.rank())
    sums = Sums(network, torch.optim.SGD(network.parameters(), lr=0.1), flags)
    train = sums.train_pass(lambda inputs, targets, weight: network(inputs).backward())  # pyright: ignore
    for step in range(3):
        network.frozen.requires_grad_(unfreezes and step > 0)
        copy.frozen.requires_grad_(unfreezes and step > 0)
        for parameter in (*network.parameters(), *copy.parameters()):
            parameter.grad = None
        for number in range(flags.accumulate_steps):
            train(scale, scale, 1.0, is_last=number == flags.accumulate_steps - 1)
        sums.wait(torch.zeros(()))
        expected = by_hand(copy, scale, flags.accumulate_steps)
        assert sums.pending_tensors() == []
        assert network.rows.weight.grad.is_sparse  # which torch.optim.SparseAdam needs
        for name, parameter in network.named_parameters():
            assert (parameter.grad is None) == (expected[name] is None), name
            if parameter.grad is not None:
                found = parameter.grad.to_dense()
                assert parameter.grad.is_sparse or found.stride() == parameter.stride(), name
                found = torch.view_as_real(found) if found.is_complex() else found
                assert torch.allclose(found, expected[name], rtol=1e-3, atol=1e-6), (name, found, expected[name])


def check_twice() -> None:
    """A gradient that backward computes again after it was sent is an error, as it is with Horovod's optimizer."""
    network = torch.nn.Linear(3, 2)
    sums = Sums(network, torch.optim.SGD(network.parameters(), lr=0.1), StrategyConfig())

    def twice(inputs, targets, weight):
        for _ in range(2):
            network(inputs).sum().backward()

    try:
        sums.train_pass(twice)(torch.ones(1, 3), torch.ones(1), 1.0, is_last=True)  # pyright: ignore
    except RuntimeError as error:
        assert "again after it was sent" in str(error), error
    else:
        raise AssertionError("it was sent once, and changed after that")
    hvd.barrier()  # a rank that ends shuts Horovod down, which would be the error of one that has yet to send


if __name__ == "__main__":
    hvd.init()
    plain = StrategyConfig()
    for changed in ({}, {"compression": "fp16"}, {"accumulate_steps": 2}):
        check(dataclasses.replace(plain, **changed), unfreezes=False)
    check(plain, unfreezes=True)
    check_twice()
