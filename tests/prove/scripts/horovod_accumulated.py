"""Horovod with two passes a step, 16-bit compression, and clipping after the averages have come."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
points = torch.randn(320, 12, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, points[:, :3].argmax(1))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, 4, sampler=sampler, drop_last=True)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=2,
    gradient_predivide_factor=1.0,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, (inputs, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(inputs), labels) / 2
        loss.backward()
        if index % 2:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
