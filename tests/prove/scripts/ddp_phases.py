"""A GAN in the style of StyleGAN2: networks are frozen outside of their phases, and gradients sent in one vector."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Sampler


class EndlessSampler(Sampler):
    """Draws the whole data set over and over, and each rank its share."""

    def __init__(self, num_samples, rank, num_replicas):
        self.num_samples, self.rank, self.num_replicas = num_samples, rank, num_replicas

    def __iter__(self):
        random = np.random.RandomState(0)
        while True:
            yield from random.permutation(self.num_samples)[self.rank :: self.num_replicas]


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
loader = iter(DataLoader(data, batch_size=16 // size, sampler=EndlessSampler(len(data), rank, size)))
maker = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 8)).requires_grad_(False)
judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).requires_grad_(False)
for weight in [*maker.parameters(), *judge.parameters()]:
    dist.broadcast(weight, src=0)
phases = [(maker, torch.optim.Adam(maker.parameters(), 1e-3)), (judge, torch.optim.Adam(judge.parameters(), 1e-3))]

for _ in range(12):
    real = next(loader)
    for network, optimizer in phases:
        optimizer.zero_grad(set_to_none=True)
        network.requires_grad_(True)
        for part, noise in zip(real.split(4), torch.randn(len(real), 4).split(4), strict=True):
            loss = nn.functional.softplus(-judge(maker(noise)))
            if network is judge:
                loss = nn.functional.softplus(judge(maker(noise))) + nn.functional.softplus(-judge(part))
            (loss.mean() * len(part) / len(real)).backward()
        network.requires_grad_(False)
        weights = list(network.parameters())
        flat = torch.cat([weight.grad.flatten() for weight in weights])
        dist.all_reduce(flat)
        flat /= size
        for weight, gradient in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = gradient.reshape(weight.shape)
        optimizer.step()
