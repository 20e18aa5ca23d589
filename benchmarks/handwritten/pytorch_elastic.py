"""An elastic job as Horovod's documentation writes it, beside which ours is measured:

    horovodrun -np 4 --min-np 2 --host-discovery-script FILE python SCRIPT --output-dir DIRECTORY

It trains until it is ended, commits every tenth step, and writes events `start` and `step` as the trainers do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

COMMIT_EVERY = 10
BATCH_SIZE, NUM_INPUTS, NUM_CLASSES = 8, 64, 10


def main(argv: Sequence[str] | None = None) -> None:
    """Train with whoever is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    directory = parser.parse_args(argv).output_dir
    hvd.init()
    directory.mkdir(exist_ok=True)
    model = torch.nn.Sequential(torch.nn.Linear(NUM_INPUTS, 128), torch.nn.ReLU(), torch.nn.Linear(128, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        write(directory, "start", world_size=hvd.size())
        while True:
            inputs, targets = torch.randn(BATCH_SIZE, NUM_INPUTS), torch.randint(NUM_CLASSES, (BATCH_SIZE,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            state.step += 1
            write(directory, "step", step=state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def write(directory: Path, event: str, **fields: int) -> None:
    """A line of metrics.jsonl, by rank 0."""
    if hvd.rank() == 0:
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


if __name__ == "__main__":
    main()
