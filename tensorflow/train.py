"""Train a network with TensorFlow and Keras 3, alone or in parallel.

    python tensorflow/train.py
    horovodrun -np 4 python tensorflow/train.py
    horovodrun -np 8 -H server1:4,server2:4 python tensorflow/train.py

`pytorch/train.py` is the same program in PyTorch, with the same flags.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import Placement
from allstep.common.process.exit import run_rank
from allstep.common.process.lean_import import lean_import
from allstep.common.start import start
from allstep.tensorflow import strategies

if TYPE_CHECKING:
    from allstep.common.hooks import Hook
    from allstep.common.session import Session


def session(config: TrainConfig, place: Placement, hooks: Sequence[Hook] = ()) -> Session | None:
    """All that trains, built as configured; None for a process that has served others, which are through."""
    # Imported only now: --help and mistakes in the flags are answered without waiting for NumPy or the framework.
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with lean_import():
        from allstep.common.noise_scale import why_not_measured
        from allstep.common.session import Session, open_dataset
        from allstep.common.weights import initial_weights
        from allstep.tensorflow.models import build_model, export_weights, import_weights
        from allstep.tensorflow.numerics import prepare
        from allstep.tensorflow.optimizers import build_optimizer
        from allstep.tensorflow.worker import Worker

    prepare(config)
    strategy = strategies.create(config, place)
    # 1. Initialise: who am I, who are the others?
    strategy.init()
    # 2. One process, one device: chosen by local rank.
    device = strategy.pin_device()
    if strategy.serve():
        return None

    dataset = open_dataset(config, strategy)
    with strategy.scope():
        shape, size = dataset.input_shape, config.model_size
        model = build_model(config.model, shape, dataset.num_classes, precision=config.precision, **size)
        optimizer = build_optimizer(config.optimizer)
        optimizer.build(model.trainable_variables)
    shapes = {name: array.shape for name, array in export_weights(model).items()}
    import_weights(model, initial_weights(shapes, config.data.seed))

    # 3. Average gradients over all ranks where they are applied.
    model, optimizer = strategy.wrap(model, optimizer)
    # 4. All ranks start from rank 0's values.
    strategy.broadcast(model, optimizer)
    # 5. Train in step; rank 0 alone writes checkpoints and logs.
    worker = Worker(
        model,
        optimizer,
        strategy=strategy,
        device=device,
        dataset=dataset,
        flags=config.optimizer,
        loss=config.loss,
        seed=config.data.seed,
        accumulate_steps=config.parallel.accumulate_steps,
        precision=config.precision,
        measures_noise=why_not_measured(config, "tensorflow") is None,
    )
    return Session(worker, dataset, config, strategy, hooks)


def main(argv: Sequence[str] | None = None, hooks: Sequence[Hook] = ()) -> None:
    if training := session(*start(strategies, argv), hooks):
        training.train()


if __name__ == "__main__":
    run_rank(main)
