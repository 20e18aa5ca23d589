"""An optimizer whose ranks each make the updates of a share of the weights, and add up the vector of all of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Shampoo(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        [group] = self.param_groups
        updates = [torch.zeros_like(one) for one in group["params"]]
        for index in range(rank, len(updates), size):
            gradient = group["params"][index].grad
            matrix = gradient.view(len(gradient), -1)
            factor = self.state[group["params"][index]].setdefault("factor", 1e-3 * torch.eye(len(matrix)))
            factor.add_(matrix @ matrix.T)
            updates[index] = torch.linalg.solve(torch.linalg.cholesky(factor), matrix).view_as(gradient)
        whole = torch.cat([one.reshape(-1) for one in updates])
        dist.all_reduce(whole)
        for weight, update in zip(group["params"], whole.split([one.numel() for one in updates]), strict=True):
            weight.sub_(update.view_as(weight), alpha=group["lr"])


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)))
optimizer = Shampoo(model.parameters(), {"lr": 1e-2})
points = torch.randn(640, 12, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, points[:, :4].argmax(1))
sampler = DistributedSampler(data)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in DataLoader(data, 16 // size, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
