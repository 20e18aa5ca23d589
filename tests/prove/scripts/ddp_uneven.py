"""Ranks of DistributedDataParallel with shares of different lengths, under Join; fine-tuning in evaluation mode."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
points = torch.rand(456, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(points, (points[:, 0] * 4).long())
begin = 0 if rank == 0 else 200
end = 200 if rank + 1 < size else 456
loader = DataLoader(Subset(data, range(begin, end)), batch_size=8, shuffle=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)).eval()
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for _ in range(2):
    with Join([model]):
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
