"""Reference for the trainer in PyTorch: the loop of Horovod's example, over tensors in memory.

    horovodrun -np 2 python -m allstep.benchmarks.handwritten.pytorch_horovod result.json \\
        --num-samples 3840 --batch-size 64 --epochs 3

Only the loop is hand-written; the network is the trainer's and starts from the same weights.
"""

import time
from collections.abc import Sequence

import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, epoch_in_memory, write
from allstep.common.recipe.weights import initial_weights
from allstep.pytorch.models import build_model, export_weights, import_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Train and write the result on rank 0."""
    flags = arguments(argv)
    hvd.init()
    torch.set_num_threads(1)

    model = build_model("cnn", (28, 28, 1), 10)
    import_weights(model, initial_weights({name: w.shape for name, w in export_weights(model).items()}, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    rates, losses = [], []
    for epoch in range(flags.epochs):
        images, labels = epoch_in_memory(flags, epoch, rank=hvd.rank(), world_size=hvd.size())
        images = torch.from_numpy(images).permute(0, 3, 1, 2)  # channels last in memory, as the trainer has them
        labels = torch.from_numpy(labels)
        hvd.barrier()
        started = time.perf_counter()
        for start in range(0, len(labels), flags.batch_size):
            optimizer.zero_grad()
            logits = model(images[start : start + flags.batch_size])
            loss = cross_entropy(logits, labels[start : start + flags.batch_size])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        rates.append(flags.num_samples / float(hvd.allreduce(seconds, op=hvd.Max)))
    losses = hvd.allreduce(torch.stack(losses)).tolist()
    if hvd.rank() == 0:
        write(flags.output, images_per_second=rates, losses=losses)


if __name__ == "__main__":
    main()
