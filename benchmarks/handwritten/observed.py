"""Horovod loop for `allstep prove` to observe: ResNet-18 on synthetic images, which prints the seconds of its steps.

The first step, which creates buffers, is not counted.
"""

import sys
import time

import horovod.torch as hvd
import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.manual_seed(hvd.rank())
num_steps, batch_size = int(sys.argv[1]), 8
images, labels = torch.randn(num_steps * batch_size, 3, 96, 96), torch.zeros(num_steps * batch_size, dtype=torch.long)
loader = DataLoader(TensorDataset(images, labels), batch_size=batch_size)
model = torchvision.models.resnet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

started = 0.0
for step, (batch, target) in enumerate(loader):
    started = time.perf_counter() if step == 1 else started
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(batch), target).backward()
    optimizer.step()
if hvd.rank() == 0:
    print(f"seconds = {time.perf_counter() - started}")
