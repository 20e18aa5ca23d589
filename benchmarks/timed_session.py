"""Train a model of one's own by a Session, as the loops in `handwritten/` do, and write what they write.

    horovodrun -np 2 python -m allstep.benchmarks.timed_session pytorch result.json \\
        --num-samples 3840 --batch-size 64 --epochs 3

The samples are arrays of float32 in memory, as those loops have them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import numpy as np

from allstep.benchmarks.handwritten.data import LEARNING_RATE, MOMENTUM, arguments, in_memory, write
from allstep.common.launch.placement import find_placement
from allstep.common.recipe.weights import initial_weights


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and let rank 0 write the rate and the mean loss of each epoch."""
    framework, *rest = sys.argv[1:] if argv is None else argv
    flags = arguments(rest)
    program = importlib.import_module(f"allstep.{framework}.program")
    models = importlib.import_module(f"allstep.{framework}.models")
    model = models.build_model("cnn", (28, 28, 1), 10)
    shapes = {name: array.shape for name, array in models.export_weights(model).items()}
    models.import_weights(model, initial_weights(shapes, 0))
    images, labels = in_memory(flags.num_samples, np.arange(flags.num_samples))
    history = program.Session(
        model,
        (images, labels),
        (images[: flags.batch_size], labels[: flags.batch_size]),
        epochs=flags.epochs,
        batch_size=flags.batch_size,
        base_lr=LEARNING_RATE,
        momentum=MOMENTUM,
        compile=flags.compile,
    ).fit()
    if find_placement().rank == 0:
        rates = [epoch["images_per_second"] for epoch in history]
        write(flags.output, images_per_second=rates, losses=[epoch["train_loss"] for epoch in history])


if __name__ == "__main__":
    main()
