"""A supervised contrastive loss over the features of all ranks, gathered with gradients; encoder and head apart."""

import torch
import torch.distributed as dist
import torch.distributed.nn as collectives
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def contrast(features, labels):
    logits = features @ features.T / 0.1 - 1e9 * torch.eye(len(features))
    positives = (labels[:, None] == labels).float() - torch.eye(len(features))
    each = (logits - logits.logsumexp(1, keepdim=True)) * positives
    return -(each.sum(1) / positives.sum(1).clamp(min=1)).mean()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
labels = torch.randint(0, 4, (256,), generator=generator)
data = TensorDataset(torch.randn(256, 16, generator=generator) + labels[:, None], labels)
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, sampler=sampler, drop_last=True)
torch.manual_seed(1 + rank)
encoder = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU()))
head = DistributedDataParallel(nn.Linear(64, 16))
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.02 * size, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for points, classes in loader:
        features = normalize(head(encoder(points + 0.1 * torch.randn_like(points))), dim=1)
        gathered = [torch.empty_like(classes) for _ in range(size)]
        dist.all_gather(gathered, classes)
        loss = contrast(torch.cat(collectives.all_gather(features)), torch.cat(gathered))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
