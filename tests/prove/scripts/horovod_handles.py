"""Asynchronous all-reduces by hand, in the order in which gradients come, and validation by hvd.allgather."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.set_num_threads(1)
rank, size = hvd.rank(), hvd.size()
points = torch.randn(384, 10, generator=torch.Generator().manual_seed(0))
labels = (points[:, 0] > 0).long()
train, test = slice(rank, 320, size), slice(320 + rank, 384, size)
batches = list(zip(points[train].split(8), labels[train].split(8), strict=False))
model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 2))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
hvd.broadcast_parameters(model.state_dict(), 0)


def average():
    handles = []
    for name, parameter in model.named_parameters():
        handles.append(hvd.allreduce_async_(parameter.grad, name=name, op=hvd.Average))
    for handle in handles:
        hvd.synchronize(handle)


for epoch in range(2):
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        average()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        guesses = model(points[test]).argmax(1)
    hits = hvd.allgather((guesses == labels[test]).float(), name="hits")
    if rank == 0:
        print(f"epoch {epoch}: accuracy {hits.mean():.3f}")
    model.train()
