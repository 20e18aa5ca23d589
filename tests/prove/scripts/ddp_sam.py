"""Sharpness-aware minimisation (SAM) under DistributedDataParallel, in bfloat16; a hook freezes some weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
points = torch.randn(512, 10, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
first, last = nn.Linear(10, 32), nn.Linear(32, 2)
mask = torch.ones_like(first.weight)
mask[:, 0] = 0
first.weight.register_hook(lambda gradient: gradient * mask)
model = DistributedDataParallel(nn.Sequential(first, nn.ReLU(), last))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * dist.get_world_size(), momentum=0.9)


def backward(inputs, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()


for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        with model.no_sync():  # each rank climbs by its own gradients
            backward(inputs, labels)
        before = [weight.detach().clone() for weight in model.parameters()]
        with torch.no_grad():
            norm = sum(weight.grad.square().sum() for weight in model.parameters()).sqrt()
            for weight in model.parameters():
                weight += 0.05 * weight.grad / norm
        optimizer.zero_grad()
        backward(inputs, labels)
        with torch.no_grad():
            for weight, old in zip(model.parameters(), before, strict=True):
                weight.copy_(old)
        optimizer.step()
        optimizer.zero_grad()
