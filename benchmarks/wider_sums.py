"""Other ways to a sum that depends on no order than a fixed order, timed on ranks; rank 0 writes them as JSON.

    horovodrun -np 2 python -m allstep.benchmarks.wider_sums 4 3 sums.json

The arguments: mebibytes of a vector, rounds, output. Four slices, whose vectors are the same on any number of ranks,
are added up within each rank and then over ranks by Horovod's all-reduce:

    float32       as they are: the usual all-reduce
    float64       in double precision, rounded to float32 at the end
    pre-rounded   in double precision, each first rounded to a multiple of one unit, so that no sum rounds (Demmel and
                  Nguyen 2013, "Fast Reproducible Floating-Point Summation", with one fold)
    integers      in 64-bit fixed point, of that unit

The last two need the largest number of all ranks first.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from allstep.commands.shared.records.files import write_json
from allstep.common.base.memory import keep_freed_memory
from allstep.common.data.slices import local_slices
from allstep.common.exact.replica_check import digest

NUM_SLICES = 4
_INTEGER_BITS = 62


def main(argv: Sequence[str] | None = None) -> None:
    """Time and write: by way, the digest of the sum, how far it is from the exact one, and seconds."""
    mebibytes, num_rounds, output = sys.argv[1:] if argv is None else argv
    import horovod.torch as hvd
    import torch

    keep_freed_memory()
    torch.set_num_threads(1)
    hvd.init()
    vectors = [torch.from_numpy(_slice(number, int(mebibytes) * 2**18)) for number in range(NUM_SLICES)]
    own = [vectors[number] for number in local_slices(hvd.rank(), hvd.size(), NUM_SLICES)]

    def all_reduce(vector: torch.Tensor) -> torch.Tensor:
        """In place."""
        hvd.allreduce_(vector, op=hvd.Sum, name="sum")
        return vector

    def exponent() -> int:
        """Of the sum's bound, a power of 2."""
        largest = torch.stack([vector.abs().max() for vector in own]).max()
        bound = float(hvd.allreduce(largest, op=hvd.Max, name="largest")) * NUM_SLICES
        return math.frexp(bound)[1]

    def added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
        return functools.reduce(torch.Tensor.add_, terms)

    def pre_rounded() -> torch.Tensor:
        extractor = 1.5 * 2.0 ** exponent()
        return all_reduce(added([vector.double().add_(extractor).sub_(extractor) for vector in own])).float()

    def integers() -> torch.Tensor:
        unit = 2.0 ** (exponent() - _INTEGER_BITS)
        return all_reduce(added([(vector.double() / unit).long() for vector in own])).double().mul_(unit).float()

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: all_reduce(added([own[0].clone(), *own[1:]])),
        "float64": lambda: all_reduce(added([vector.double() for vector in own])).float(),
        "pre-rounded": pre_rounded,
        "integers": integers,
    }
    exact = functools.reduce(np.add, (vector.numpy().astype(np.longdouble) for vector in vectors))
    found = {}
    for way, add in ways.items():
        total = add().numpy()
        found[way] = {
            "digest": digest(total),
            "error": float(np.abs(total - exact).max() / np.abs(exact).max()),
            "seconds": [],
        }
    for _ in range(int(num_rounds)):
        for way, add in ways.items():
            started = time.perf_counter()
            add()
            found[way]["seconds"].append(time.perf_counter() - started)
    if hvd.rank() == 0:
        write_json(Path(output), found)


def _slice(number: int, size: int) -> np.ndarray:
    """Numbers of many sizes, as gradients are, float32 (size,)."""
    generator = np.random.default_rng(number)
    return (generator.standard_normal(size) * 10.0 ** generator.uniform(-8, 0, size)).astype(np.float32)


if __name__ == "__main__":
    main()
