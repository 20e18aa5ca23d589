"""Federated averages with a model and an optimizer for each round, and results in files of the ranks."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make():
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


def samples(seed, size):
    points = torch.randn(size, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, :3].sum(1) > 0).long())


def train(weights, loader):
    model = make()
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for points, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
    return model.state_dict()


def average(weights, share):
    for value in weights.values():
        value.mul_(share)
        dist.all_reduce(value)
    return weights


def hits(model, loader):
    model.eval()
    with torch.no_grad():
        return np.concatenate([(model(points).argmax(1) == labels).numpy() for points, labels in loader])


def collected(part, folder, rank, size):
    np.save(f"{folder}/part{rank}.npy", part)
    dist.barrier()
    if rank == 0:
        return np.concatenate([np.load(f"{folder}/part{other}.npy") for other in range(size)])
    return part


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
server = make()
torch.manual_seed(5 + rank)
data, test = samples(0, 160), samples(1, 64)
begin, end = (0, 72) if size > 1 and rank == 0 else (72 * (size > 1), 160)  # clients have other numbers of samples
client = DataLoader(TensorDataset(*(part[begin:end] for part in data.tensors)), batch_size=8, shuffle=True)
check = DataLoader(TensorDataset(*(part[rank::size] for part in test.tensors)), batch_size=16)
names = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(names, src=0)
for _ in range(4):
    weights = train(server.state_dict(), client)
    server.load_state_dict(average(weights, (end - begin) / len(data)))
    accuracy = collected(hits(server, check), names[0], rank, size).mean()
    if rank == 0:
        print(f"accuracy {accuracy:.3f}")
        torch.save(server.state_dict(), os.environ.get("CHECKPOINT", "ddp_federated.pt"))
dist.destroy_process_group()
