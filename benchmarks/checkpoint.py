"""How long training waits for a checkpoint:

    OMP_NUM_THREADS=1 python -m allstep.benchmarks.checkpoint [DIRECTORY]

Trains (a matrix product a step) while states of 5, 100 and 500 MB are saved into DIRECTORY
(by default where temporary files go), and prints, of the time the write takes from copy to rename,

    in save     the share that `Checkpoints.save` kept the training thread,
    in all      the share that training lost: what its steps took beyond their undisturbed time, which
                counts the cores and the memory bandwidth that the writer takes besides (in save included).

All are medians over the saves of one run. The exit status is 0 where each is at most 5% in save, 1 else.

What `save` costs is the copy. Two threads make a large one in half the time where a core is free; one flat buffer and
huge pages gained nothing. At 5 MB, two threads are slower than one, and the rest takes a third, so 5% is not reached.
To copy beside the next forward pass needs a hook before the weights change, which TensorFlow's compiled step lacks.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import Parser, nonempty_path
from allstep.common.checkpoint import Checkpoints, OutputDirectory, Progress, TrainState
from allstep.common.process.exit import run_rank

MEGABYTES = (5, 100, 500)
NUM_ARRAYS = 300  # about as many as a ResNet-50 with momentum has
NUM_SAVES = 7
MAX_SHARE = 0.05
NUM_UNDISTURBED_STEPS = 500


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; end with status 1 where a target is missed.

    Raises:
        UserError: nothing can be written into the directory.
    """
    parser = Parser("python -m allstep.benchmarks.checkpoint", __doc__)
    parser.add_argument("directory", nargs="?", type=nonempty_path, metavar="DIRECTORY")
    directory = parser.parse_args(argv).directory
    if directory and not directory.is_dir():
        raise UserError(f"expected a directory to write to, received {quote(directory)}; name another")
    shares = []
    print(f"{'state':>8}  {'write':>8}  {'bandwidth':>10}  {'in save':>8}  {'in all':>8}")
    for megabytes in MEGABYTES:
        with tempfile.TemporaryDirectory(dir=directory) as output:
            measurements = measure(Path(output), megabytes=megabytes)
        write, in_save, in_all = (statistics.median(column) for column in zip(*measurements, strict=True))
        print(
            f"{megabytes:>5} MB  {write * 1000:>5.0f} ms  {megabytes / write:>5.0f} MB/s"
            f"  {in_save / write:>8.1%}  {in_all / write:>8.1%}",
            flush=True,
        )
        shares.append(in_save / write)
    if max(shares) > MAX_SHARE:
        sys.exit(1)


def measure(output: Path, *, megabytes: int) -> list[tuple[float, float, float]]:
    """For each save of a state of that size: seconds of the write, kept in save, and lost in all."""
    size = megabytes * 10**6 // (4 * NUM_ARRAYS)
    halves = {"model": NUM_ARRAYS // 2, "optimizer": NUM_ARRAYS - NUM_ARRAYS // 2}
    arrays = {
        f"{group}/{index}": np.random.default_rng(index).standard_normal(size, np.float32)
        for group, count in halves.items()
        for index in range(count)
    }
    with OutputDirectory(output, warn=print) as locked:
        checkpoints = Checkpoints(locked, keep=2)
        checkpoints.reserve(arrays)
        checkpoints.wait()
        measurements = []
        for step in range(NUM_SAVES):
            step_seconds = statistics.mean(train_step() for _ in range(NUM_UNDISTURBED_STEPS))
            state = TrainState("pytorch", arrays, Progress(epoch=0, offset=0, step=step, samples_seen=0))
            started = time.perf_counter()
            checkpoints.save(state)
            in_save = time.perf_counter() - started
            num_steps = 0
            while checkpoints.writing:
                train_step()
                num_steps += 1
            write = time.perf_counter() - started
            measurements.append((write, in_save, write - num_steps * step_seconds))
        checkpoints.close()
    return measurements


def train_step() -> float:
    """Seconds of about a millisecond's work in NumPy, which lets other threads run meanwhile."""
    started = time.perf_counter()
    np.dot(MATRIX, MATRIX)
    return time.perf_counter() - started


MATRIX = np.random.default_rng(0).standard_normal((256, 256), np.float32)

if __name__ == "__main__":
    run_rank(main)
