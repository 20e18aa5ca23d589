"""Gradient accumulation with no_sync, and a last round that is shorter."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ROUND = 4


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, inputs):
        return self.head(checkpoint(self.body, inputs, use_reentrant=False))


dist.init_process_group("gloo")
points = torch.randn(176, 10, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points[:, 0].abs() * 4).long().clamp(max=4))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
torch.manual_seed(0)
model = DistributedDataParallel(Network(), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)

for epoch in range(3):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for index, (inputs, labels) in enumerate(loader):
        is_last = (index + 1) % ROUND == 0 or index + 1 == len(loader)
        length = min(ROUND, len(loader) - index // ROUND * ROUND)
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), labels) / length
            loss.backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
