"""Code shared by the hand-written loops on a GPU: flags, and blocks of batches timed in turn with other jobs."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from allstep.commands.shared import turns
from allstep.commands.shared.records.files import write_json
from allstep.commands.shared.records.measured import Block, Measured

LEARNING_RATE = 0.01
MOMENTUM = 0.9


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse those flags of `allstep.commands.compare.synthetic` that the loops have, under the same names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("cnn", "resnet18", "resnet50"), required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--synthetic-shape", type=int, nargs=3, required=True)
    parser.add_argument("--synthetic-classes", type=int, required=True)
    parser.add_argument("--precision", choices=("float32", "bf16"), required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--num-warmup-batches", type=int, required=True)
    parser.add_argument("--num-batches-per-iter", type=int, required=True)
    parser.add_argument("--num-iters", type=int, required=True)
    parser.add_argument("--turns", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


def time_blocks(flags: argparse.Namespace, step: Callable[[], object], wait: Callable[[], None]) -> None:
    """Warm up, time each block in its turn, and write the blocks like `allstep.commands.compare.synthetic`.

    `step` trains on one batch, and may return before the work is done; `wait` returns when all work is done.
    """
    for _ in range(flags.num_warmup_batches):
        step()
    wait()
    wait_for_turn = turns.join(flags.turns, 1)
    seconds = []
    for _ in range(flags.num_iters):
        wait_for_turn()
        started = time.perf_counter()
        for _ in range(flags.num_batches_per_iter):
            step()
        wait()
        seconds.append(time.perf_counter() - started)
    wait_for_turn()
    num_images = flags.batch_size * flags.num_batches_per_iter
    blocks = tuple(Block(num_images, (one,)) for one in seconds)
    write_json(flags.output, Measured(blocks, (), first_step_at=None, epochs=None))
