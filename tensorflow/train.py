"""Train a network with TensorFlow and Keras 3, alone or in parallel.

    python tensorflow/train.py
    horovodrun -np 4 python tensorflow/train.py
    horovodrun -np 8 -H server1:4,server2:4 python tensorflow/train.py

`pytorch/train.py` is the same program in PyTorch, with the same flags.
"""

from __future__ import annotations

import os

from allstep.common.by_hand import locate
from allstep.common.command_line import parse
from allstep.common.ending import run_rank
from allstep.common.launcher import placement
from allstep.common.loopback import stay_on_host
from allstep.common.quiet import lean_import
from allstep.common.strategies import print_strategies
from allstep.tensorflow.strategies import STRATEGIES, availability, check, create


def main() -> None:
    place = placement()
    config = parse(STRATEGIES, place)
    if config.list_strategies:
        return print_strategies(STRATEGIES, availability, place)
    check(config, place)

    place = locate(place)
    stay_on_host(place)

    # Imported only now: --help and mistakes in the flags are answered without waiting for NumPy or the framework.
    from allstep.common import resuming

    if place.rank == 0:
        resuming.check_early(config)

    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with lean_import():
        from allstep.common import run
        from allstep.common.weights import initial_weights
        from allstep.tensorflow.models import build_model, export_weights, import_weights
        from allstep.tensorflow.optimizers import build_optimizer
        from allstep.tensorflow.worker import Worker

    strategy = create(config, place)
    # 1. Initialise: who am I, who are the others?
    strategy.init()
    # 2. One process, one device: chosen by local rank.
    device = strategy.pin_device()
    if strategy.serve():
        return
    place = strategy.place

    dataset = run.open_dataset(config, place, strategy.collectives)
    with strategy.scope():
        model = build_model(config.model, dataset.image_shape, dataset.num_classes, precision=config.precision)
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
        slots=config.optimizer.slots,
        accumulate_steps=config.parallel.accumulate_steps,
    )
    run.train(
        worker,
        dataset,
        config,
        place,
        steps_in_flight=strategy.steps_in_flight,
        metrics=strategy.metrics,
    )


if __name__ == "__main__":
    run_rank(main)
