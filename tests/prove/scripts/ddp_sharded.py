"""Fully sharded weights (FSDP2), and an optimizer with sharded states beside them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
data = TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
other = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
other_optimizer = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, lr=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (inputs,) in loader:
        optimizer.zero_grad()
        other_optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs) + other(inputs), inputs).backward()
        optimizer.step()
        other_optimizer.step()
