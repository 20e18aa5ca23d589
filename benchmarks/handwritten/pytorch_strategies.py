"""What a user would write by hand for each strategy of PyTorch, over tensors that lie in memory.

    torchrun --nproc-per-node 2 -m allstep.benchmarks.handwritten.pytorch_strategies ddp result.json \\
        --num-samples 3840 --batch-size 64 --epochs 3

`single` and `data-parallel` are one process. The network is the trainer's and starts from the same weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, epoch_in_memory, write
from allstep.common.base.memory import keep_freed_memory
from allstep.common.recipe.weights import initial_weights
from allstep.pytorch.models import build_model, export_weights, import_weights

NUM_MICRO_BATCHES = 4


def single(model, optimizer_of):
    optimizer = optimizer_of(model.parameters())

    def step(images, labels):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def data_parallel(model, optimizer_of):
    return single(torch.nn.DataParallel(model), optimizer_of)


def ddp(model, optimizer_of):
    return single(torch.nn.parallel.DistributedDataParallel(model), optimizer_of)


def fsdp(model, optimizer_of):
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    return single(fully_shard(model), optimizer_of)


def model_parallel(model, optimizer_of):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    # Each stage has as many layers with weights as the other.
    weighted = [index for index, layer in enumerate(model) if list(layer.parameters())]
    cut = weighted[(len(weighted) + 1) // 2]
    is_first = dist.get_rank() == 0
    part = model[:cut] if is_first else model[cut:]
    optimizer = optimizer_of(part.parameters())
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=cross_entropy)

    def step(images, labels):
        optimizer.zero_grad()
        losses = []
        if is_first:
            schedule.step(images, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


STEPS = {
    "single": single,
    "data-parallel": data_parallel,
    "ddp": ddp,
    "fsdp": fsdp,
    "model-parallel": model_parallel,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and let rank 0 write the result."""
    flags = arguments(argv, strategies=STEPS)
    keep_freed_memory()  # as in the trainers: it is not the C library's allocator that is compared
    torch.set_num_threads(1)
    rank, world_size = 0, 1
    if flags.strategy not in ("single", "data-parallel"):
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    # All stages of a pipeline take the same samples.
    shard = (0, 1) if flags.strategy == "model-parallel" else (rank, world_size)

    model = build_model("cnn", (28, 28, 1), 10)
    import_weights(model, initial_weights({name: w.shape for name, w in export_weights(model).items()}, 0))
    if flags.compile:
        layers = [layer for layer in model.children() if list(layer.parameters())]
        for part in layers if flags.strategy == "fsdp" else [model]:
            part.forward = torch.compile(part.forward, dynamic=False)  # within the hooks of FSDP
    step = STEPS[flags.strategy](
        model, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
    )

    rates, losses = [], []
    for epoch in range(flags.epochs):
        images, labels = epoch_in_memory(
            flags.num_samples, epoch, batch_size=flags.batch_size, rank=shard[0], world_size=shard[1]
        )
        images = torch.from_numpy(images).permute(0, 3, 1, 2)  # channels last in memory, as the trainer has them
        labels = torch.from_numpy(labels)
        if world_size > 1:
            dist.barrier()
        started = time.perf_counter()
        for start in range(0, len(labels), flags.batch_size):
            end = start + flags.batch_size
            losses.append(step(images[start:end], labels[start:end]))
        if world_size > 1:
            dist.barrier()
        rates.append(flags.num_samples / (time.perf_counter() - started))
    losses = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(losses)
        losses /= shard[1]
    if rank == 0:
        write(flags.output, images_per_second=rates, losses=losses.tolist())
    if world_size > 1:
        dist.destroy_process_group()
        os._exit(0)  # a thread of Gloo's may abort a process that takes Python apart (torch 2.14)


if __name__ == "__main__":
    main()
