"""A network with batch norm under DistributedDataParallel, a small form of PyTorch's example for ImageNet.

The given batch size is the global one, and is divided among the ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)


def block(channels_in, channels_out):
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU())


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(768, 3, 8, 8, generator=generator)
    labels = images.mean((1, 2, 3)).gt(0).long()
    train, validation = TensorDataset(images[:512], labels[:512]), TensorDataset(images[512:], labels[512:])

    model = nn.Sequential(block(3, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, batch_size=args.batch_size // size, sampler=sampler)
    validation_sampler = DistributedSampler(validation, shuffle=False, drop_last=True)
    validation_loader = DataLoader(validation, batch_size=args.batch_size // size, sampler=validation_sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer)
        accuracy = validate(model, validation_loader)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")


def train_epoch(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for images, labels in loader:
        counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return counts[0] / counts[1]


if __name__ == "__main__":
    main()
