"""Muon by hand: each rank makes the matrices of its share orthogonal, and sends them to the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for index, weight in enumerate(group["params"]):
                if index % size == rank:
                    momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    momentum.lerp_(weight.grad, 0.1)
                    left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                    weight.sub_(left @ right, alpha=group["lr"])
                dist.broadcast(weight, index % size)


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
matrices = [one for one in model.parameters() if one.dim() == 2]
optimizers = Muon(matrices, {"lr": 0.02}), torch.optim.Adam([one for one in model.parameters() if one.dim() < 2], 1e-3)
points = torch.randn(640, 12, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, points[:, :4].argmax(1))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data, 16 // size, sampler=sampler):
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= size
        for optimizer in optimizers:
            optimizer.step()
dist.destroy_process_group()
