"""Momentum contrast under Horovod: a moving average of the encoder, and a queue of keys that all ranks have alike."""

import copy

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
data = TensorDataset(torch.randn(320, 12, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data, hvd.size(), hvd.rank())
loader = DataLoader(data, 8, sampler=sampler, drop_last=True)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(64, 6), dim=1))
        self.cursor = 0

    @torch.no_grad()
    def update(self):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=False):
            slow.lerp_(fast, 0.1)

    @torch.no_grad()
    def enqueue(self, keys):
        keys = hvd.allgather(keys, name="keys")
        rows = torch.arange(self.cursor, self.cursor + len(keys)) % len(self.queue)
        self.queue[rows] = keys
        self.cursor = int(rows[-1] + 1) % len(self.queue)

    def forward(self, first, second):
        queries = F.normalize(self.query(first), dim=1)
        with torch.no_grad():
            self.update()
            keys = F.normalize(self.key(second), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().T], 1) / 0.2
        self.enqueue(keys)
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


model = Contrast()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.01 * hvd.size(), weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.query.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (inputs,) in loader:
        noise = 0.1 * torch.randn(2, *inputs.shape)
        optimizer.zero_grad()
        model(inputs + noise[0], inputs + noise[1]).backward()
        optimizer.step()
