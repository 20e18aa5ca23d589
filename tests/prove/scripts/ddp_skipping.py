"""Steps that all ranks skip if the loss of one is too large; gradients are flattened, and averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def sync_weights(module):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(parameters):
    gradients = [one.grad for one in parameters]
    flat = _flatten_dense_tensors(gradients)
    handle = dist.all_reduce(flat, async_op=True)
    handle.wait()
    flat /= dist.get_world_size()
    for gradient, average in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=False):
        gradient.copy_(average)


def step(optimizer, parameters, decay=1e-2):
    with torch.no_grad():
        for one in parameters:
            one.mul_(1 - decay * optimizer.param_groups[0]["lr"])
    optimizer.step()


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
points = torch.randn(320, 9, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, points[:, :1].exp())
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
sync_weights(model)
parameters = list(model.parameters())
optimizer = torch.optim.Adam(parameters, 1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        worst = loss.detach().clone()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(parameters)
        if worst > 6:
            continue
        nn.utils.clip_grad_norm_(parameters, 100.0)
        step(optimizer, parameters)
