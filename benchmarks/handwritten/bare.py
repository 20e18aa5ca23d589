"""Reference for the trainer's start-up: import what a rank imports, connect to the others, and take one tiny step.

    horovodrun -np 2 python -m allstep.benchmarks.handwritten.bare pytorch done

The file `done` appears when the step is taken.
"""

import os
import sys
from pathlib import Path


def pytorch() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    model(torch.ones(1)).sum().backward()
    optimizer.step()


def tensorflow() -> None:
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import horovod.tensorflow as hvd
    import keras  # noqa: F401 (its import is part of the time)
    import tensorflow as tf

    hvd.init()
    weight = tf.Variable(1.0)  # pyright: ignore[reportArgumentType]
    with tf.GradientTape() as tape:
        loss = weight * 2.0
    weight.assign_sub(0.01 * hvd.allreduce(tape.gradient(loss, weight)))  # pyright: ignore[reportOperatorIssue]


if __name__ == "__main__":
    {"pytorch": pytorch, "tensorflow": tensorflow}[sys.argv[1]]()
    Path(sys.argv[2]).touch()
