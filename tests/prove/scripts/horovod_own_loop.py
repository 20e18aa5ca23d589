"""Horovod without its optimizer: gradients are averaged explicitly, and each rank slices its batches out of arrays."""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(1)
size, rank = hvd.size(), hvd.rank()

inputs = torch.randn(960, 16)
targets = inputs[:, :1] * 2 - inputs[:, 1:2] + 3
share = slice(rank, None, size)
inputs, targets = inputs[share], targets[share]

model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

for step in range(12):
    batch = slice(step * 32, step * 32 + 32)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = hvd.allreduce(parameter.grad)
    optimizer.step()

hvd.barrier()
if rank == 0:
    print("trained")
