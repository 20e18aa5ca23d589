"""Averages of weights (EMA in training, SWA at its end), with batch norm that is updated on all samples."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
points = torch.randn(448, 12, generator=generator)
labels = (points[:, 0] > 0).long()
train, test = TensorDataset(points[:320], labels[:320]), TensorDataset(points[320:], labels[320:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
test_loader = DataLoader(test, batch_size=32, sampler=DistributedSampler(test, shuffle=False))
torch.manual_seed(1)
network = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
model = DistributedDataParallel(network)
ema = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
swa = AveragedModel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = SWALR(optimizer, swa_lr=5e-4, anneal_epochs=2)


@torch.no_grad()
def accuracy(module):
    module.eval()
    counts = torch.zeros(2)
    for inputs, targets in test_loader:
        counts += torch.tensor([(module(inputs).argmax(1) == targets).sum().item(), len(targets)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        dist.broadcast(network[1].running_mean, src=0)
        dist.broadcast(network[1].running_var, src=0)
        ema.update_parameters(network)
    schedule.step()
    swa.update_parameters(network)
    result = accuracy(ema)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {result:.3f}")

whole = DataLoader(train, batch_size=32)
update_bn(whole, swa)
result = accuracy(swa)
if rank == 0:
    print(f"averaged: accuracy {result:.3f}")
    torch.save(swa.module.state_dict(), "swa.pt")
