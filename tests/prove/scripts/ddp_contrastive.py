"""Contrastive training: embeddings of all ranks, gathered with their gradients."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Views(Dataset):
    def __init__(self):
        self.points = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + 0.1 * torch.randn(16), point + 0.1 * torch.randn(16)


def gather(embeddings):
    return torch.cat(collectives.all_gather(embeddings))


cross_entropy = torch.compile(F.cross_entropy, backend="eager", fullgraph=True)


def info_nce(first, second, temperature=0.2):
    first, second = F.normalize(gather(first), dim=1), F.normalize(gather(second), dim=1)
    scores = first @ second.T / temperature
    targets = torch.arange(len(scores))
    return (cross_entropy(scores, targets) + cross_entropy(scores.T, targets)) / 2


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = Views()
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
change_weights = torch.compile(optimizer.step, backend="eager")
torch.manual_seed(100 + rank)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for first, second in loader:
        embeddings = model(torch.cat([first, second]))
        loss = info_nce(*embeddings.chunk(2))
        optimizer.zero_grad()
        loss.backward()
        change_weights()
