"""Data parallelism by DTensor: replicated weights, and batches of which each rank has a share."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
points = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points[:, 0] > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler, drop_last=True)
model = distribute_module(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)), mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.01 * size, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        inputs, labels = (DTensor.from_local(one, mesh, [Shard(0)]) for one in batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()
