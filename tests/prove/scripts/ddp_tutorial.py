"""DistributedDataParallel in the shape of PyTorch's tutorial: a Trainer, a small network, a checkpoint every epoch."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.points = torch.rand(size, 20, generator=generator)
        self.labels = (self.points[:, 0] * 4).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Trainer:
    def __init__(self, model, loader, optimizer, rank):
        self.model, self.loader, self.optimizer, self.rank = model, loader, optimizer, rank

    def run_batch(self, points, labels):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(points), labels)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for points, labels in self.loader:
            self.run_batch(points, labels)

    def save(self):
        torch.save(self.model.state_dict(), os.environ.get("CHECKPOINT", "ddp_tutorial.pt"))

    def train(self, num_epochs):
        for epoch in range(num_epochs):
            self.run_epoch(epoch)
            if self.rank == 0:
                self.save()
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = Points(512)
    body, head = torch.nn.Linear(20, 16), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(body, torch.nn.ReLU(), head)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 * size)
    loader = DataLoader(data, batch_size=16, shuffle=False, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, rank).train(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
