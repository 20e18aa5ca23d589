"""Communication hooks: gradients sent as 16 bits, and by PowerSGD after some steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = TensorDataset(torch.randn(320, 32, generator=torch.Generator().manual_seed(0)))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)


def average(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(size))


def network(seed):
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)))


halved, low_rank, own = network(0), network(1), network(2)
halved.register_comm_hook(None, default_hooks.fp16_compress_hook)
state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=1)
low_rank.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
own.register_comm_hook(None, average)
optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (halved, low_rank, own)]

for epoch in range(2):
    sampler.set_epoch(epoch)
    for (inputs,) in loader:
        for model, optimizer in zip((halved, low_rank, own), optimizers, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), inputs).backward()
            optimizer.step()
