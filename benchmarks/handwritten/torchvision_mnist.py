"""The input pipeline's reference: that of Horovod's pytorch_mnist example, sample by sample through torchvision.

    horovodrun -np 2 python -m allstep.benchmarks.handwritten.torchvision_mnist result.json \\
        --data-dir DIRECTORY --model cnn --batch-size 64

As in the example the loader has no worker processes on CPUs. Only the network and the optimizer's numbers are the
trainer's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

from allstep.benchmarks.handwritten.data import write
from allstep.pytorch.models import build_model


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and let rank 0 write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path, help="JSON file that rank 0 writes")
    parser.add_argument("--data-dir", type=Path, required=True, help="holds MNIST/raw")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank and step")
    flags = parser.parse_args(argv)
    hvd.init()
    torch.set_num_threads(1)

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(flags.data_dir, train=True, download=False, transform=transform)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=flags.batch_size, sampler=sampler)

    model = build_model(flags.model, (28, 28, 1), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    hvd.barrier()
    started = time.perf_counter()
    sampler.set_epoch(0)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    rate = len(dataset) / float(hvd.allreduce(seconds, op=hvd.Max))
    if hvd.rank() == 0:
        write(flags.output, images_per_second=[rate])


if __name__ == "__main__":
    main()
