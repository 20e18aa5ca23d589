"""A convolutional network under Horovod, in the shape of Horovod's example for MNIST."""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--checkpoint", default="horovod_images.pt")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)

generator = torch.Generator().manual_seed(0)
images = torch.randn(1280, 1, 8, 8, generator=generator)
labels = images.reshape(-1, 64)[:, :10].argmax(1)
train, test = TensorDataset(images[:1024], labels[:1024]), TensorDataset(images[1024:], labels[1024:])
train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
test_loader = DataLoader(test, batch_size=64, sampler=test_sampler)

model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(72, 32), nn.ReLU(),
    nn.Linear(32, 10),
)  # fmt: skip
plain_optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(plain_optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def train_epoch(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def evaluate():
    model.eval()
    correct = torch.tensor(0.0)
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data).argmax(1) == target).sum()
    return hvd.allreduce(correct / len(test_loader.dataset), op=hvd.Sum, name="accuracy").item()


for epoch in range(args.epochs):
    train_epoch(epoch)
    accuracy = evaluate()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")

if hvd.rank() == 0:
    torch.save(model.state_dict(), args.checkpoint)
