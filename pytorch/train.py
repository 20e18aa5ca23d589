"""Train a network with PyTorch, alone or in parallel.

    python pytorch/train.py
    horovodrun -np 4 python pytorch/train.py
    horovodrun -np 8 -H server1:4,server2:4 python pytorch/train.py
    python pytorch/train.py --strategy ddp --num-gpus 4
    torchrun --nproc-per-node 4 pytorch/train.py --strategy ddp

`tensorflow/train.py` is the same program in TensorFlow, with the same flags.
"""

from __future__ import annotations

import sys

from allstep.common.by_hand import locate
from allstep.common.command_line import parse
from allstep.common.ending import run_rank
from allstep.common.launcher import placement
from allstep.common.loopback import stay_on_host
from allstep.common.spawn import spawn
from allstep.common.strategies import print_strategies
from allstep.pytorch.strategies import STRATEGIES, availability, check, create, num_ranks_to_spawn


def main() -> None:
    place = placement()
    config = parse(STRATEGIES, place)
    if config.list_strategies:
        return print_strategies(STRATEGIES, availability, place)
    check(config, place)
    if num_ranks := num_ranks_to_spawn(config, place):
        sys.exit(spawn(num_ranks))

    place = locate(place)
    stay_on_host(place)

    # Imported only now: --help and mistakes in the flags are answered without waiting for NumPy or the framework.
    from allstep.common import resuming

    if place.rank == 0:
        resuming.check_early(config)

    from allstep.common import run
    from allstep.common.weights import initial_weights
    from allstep.pytorch.models import build_model, export_weights, import_weights
    from allstep.pytorch.optimizers import build_optimizer
    from allstep.pytorch.worker import Worker

    strategy = create(config, place)
    # 1. Initialise: who am I, who are the others?
    strategy.init()
    # 2. One process, one device: chosen by local rank.
    device = strategy.pin_device()

    dataset = run.open_dataset(config, place, strategy.collectives)
    with strategy.scope():
        network = build_model(config.model, dataset.image_shape, dataset.num_classes)
        optimizer = build_optimizer(config.optimizer, network.parameters())
    shapes = {name: array.shape for name, array in export_weights(network).items()}
    import_weights(network, initial_weights(shapes, config.data.seed))

    # 3. Average gradients over all ranks where they are applied.
    model, optimizer = strategy.wrap(network, optimizer)
    # 4. All ranks start from rank 0's values.
    strategy.broadcast(model, optimizer)
    # 5. Train in step; rank 0 alone writes checkpoints and logs.
    worker = Worker(
        network,
        model,
        optimizer,
        strategy=strategy,
        device=device,
        dataset=dataset,
        slots=config.optimizer.slots,
        accumulate_steps=config.parallel.accumulate_steps,
        precision=config.precision,
    )
    run.train(worker, dataset, config, place)


if __name__ == "__main__":
    run_rank(main)
