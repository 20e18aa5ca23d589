"""Rank 0 alone validates a network with batch norm, and tells the others whether to go on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
points = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
labels = points[:, :4].argmax(1)
train, test = TensorDataset(points[:320], labels[:320]), TensorDataset(points[320:], labels[320:])
sampler = DistributedSampler(train)
loader, test_loader = DataLoader(train, 16 // size, sampler=sampler), DataLoader(test, 16)
model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    correct = torch.zeros(1)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            for inputs, targets in test_loader:
                correct += (model.module(inputs).argmax(1) == targets).sum()
    dist.broadcast(correct, 0)
    if correct == len(test):
        break
dist.destroy_process_group()
