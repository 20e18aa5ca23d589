"""The trainer's reference for start-up: import what a rank imports, join the others, one all-reduce.

    horovodrun -np 2 python -m allstep.benchmarks.handwritten.bare pytorch done
"""

from __future__ import annotations

import sys
from pathlib import Path


def pytorch() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1))


def tensorflow() -> None:
    import horovod.tensorflow as hvd
    import keras  # noqa: F401 (its import is part of the time)

    import tensorflow as tf

    hvd.init()
    hvd.allreduce(tf.ones(1))


if __name__ == "__main__":
    {"pytorch": pytorch, "tensorflow": tensorflow}[sys.argv[1]]()
    Path(sys.argv[2]).touch()
