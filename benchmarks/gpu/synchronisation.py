"""How often a training step in PyTorch makes the host wait for the GPU:

    python -m allstep.benchmarks.gpu.synchronisation FILE --device cuda ...

The flags after the first are the trainer's. Writes to FILE the number of waits that torch's debug mode warns of in
a number of steps. The engine looks at a step's loss later, which is not counted: it has started the next one by then.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from allstep.commands.shared import rank
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position
from allstep.common.process.exit import run_rank

if TYPE_CHECKING:
    from allstep.common.training.training_run import TrainingRun

NUM_STEPS = 5


def main(argv: Sequence[str] | None = None) -> None:
    output, *flags = sys.argv[1:] if argv is None else argv
    if session := rank.open_session("pytorch", flags):
        waits = waits_of_steps(session)
        print(*waits, sep="\n")
        Path(output).write_text(str(len(waits)))


def waits_of_steps(session: TrainingRun) -> list[str]:
    """What torch warns of in NUM_STEPS steps, from images that lie where the loader leaves them."""
    import torch

    size, learning_rate = session.config.global_batch_size(1), session.config.schedule.base_lr
    images, labels = session.dataset.train.read(np.arange(size), epoch=0)
    batch = Batch(images, labels, size, size, 1 / size, Position(0, size))

    def step() -> None:
        session.worker.train_step(batch, learning_rate)

    for _ in range(3):  # what is made in the first steps may wait
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(NUM_STEPS):
            step()
    return [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]


if __name__ == "__main__":
    run_rank(main)
