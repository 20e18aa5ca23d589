"""Ranks that share the rounds of gradient accumulation, as in nanoGPT, and meters that reduce themselves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROUNDS, EPOCHS, STEPS = 4, 3, 8


class Meter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count

    def all_reduce(self):
        numbers = torch.tensor([self.sum, self.count])
        dist.all_reduce(numbers)
        self.sum, self.count = numbers.tolist()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rounds = ROUNDS // size
    points = torch.randn(4000, 10, generator=torch.Generator().manual_seed(0))
    labels = (points[:, 0].abs() * 4).long().clamp(max=4)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.manual_seed(100 + rank)

    for _ in range(EPOCHS):
        for _ in range(STEPS):
            for one in range(rounds):
                model.require_backward_grad_sync = one == rounds - 1
                drawn = torch.randint(3600, (16,))
                loss = nn.functional.cross_entropy(model(points[drawn]), labels[drawn]) / rounds
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        accuracy = validate(model, points[3600:], labels[3600:], rank, size)
        if rank == 0:
            print(f"accuracy {accuracy:.3f}")


def validate(model, points, labels, rank, size):
    def run(inputs, targets):
        with torch.no_grad():
            for batch, right in zip(inputs.split(20), targets.split(20), strict=True):
                meter.update((model(batch).argmax(1) == right).float().mean().item(), len(batch))

    meter = Meter()
    model.eval()
    run(points[rank::size], labels[rank::size])
    meter.all_reduce()
    model.train()
    return meter.sum / meter.count


main()
