"""L-BFGS under DistributedDataParallel, whose line search needs the same loss on all ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
points = torch.randn(400, 6, generator=generator)
values = points.sum(1) + 0.1 * torch.randn(400, generator=generator)
points, values = points[rank::size], values[rank::size]
model = DistributedDataParallel(torch.nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(points).squeeze(1), values)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / size


for _ in range(15):
    optimizer.step(closure)
