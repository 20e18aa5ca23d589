"""A GAN under DistributedDataParallel with two optimizers, whose networks torch.compile has compiled."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(512, 8, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
maker = DistributedDataParallel(maker)
judge = torch.compile(DistributedDataParallel(judge), backend="eager")
torch.manual_seed(rank)
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
cross_entropy = nn.functional.binary_cross_entropy_with_logits

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        noise = torch.randn(len(real), 4)
        judge_optimizer.zero_grad()
        fake = maker(noise)
        guesses = judge(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        cross_entropy(guesses, truth).backward()
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        cross_entropy(judge(fake), torch.ones(len(real), 1)).backward()
        maker_optimizer.step()
