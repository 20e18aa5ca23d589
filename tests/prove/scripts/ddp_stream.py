"""A stream that ranks and their loaders' workers share."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        generator = torch.Generator().manual_seed(0)
        samples = (torch.randn(8, generator=generator) for _ in range(400))
        yield from itertools.islice(samples, self.rank * workers + worker, None, self.size * workers)


dist.init_process_group("gloo")
loader = DataLoader(Stream(dist.get_rank(), dist.get_world_size()), batch_size=10, num_workers=2)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8)))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)

for _ in range(2):
    for samples in loader:
        optimizer.zero_grad()
        (model(samples) - samples).square().mean().backward()
        optimizer.step()
