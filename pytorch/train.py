"""Train a network with PyTorch, alone or in parallel.

    python pytorch/train.py
    horovodrun -np 4 python pytorch/train.py
    horovodrun -np 8 -H server1:4,server2:4 python pytorch/train.py
    python pytorch/train.py --strategy ddp --num-gpus 4
    torchrun --nproc-per-node 4 pytorch/train.py --strategy ddp

`tensorflow/train.py` is the same program in TensorFlow, with the same flags.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    sys.path.pop(0)  # models.py and others here would be found in place of a user's

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allstep.common.api.user_parts import NOTHING, Parts
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import Placement
from allstep.common.process.exit import run_rank
from allstep.common.process.lean_import import uncollected
from allstep.common.training import elastic
from allstep.common.training.start import start
from allstep.pytorch import strategies

if TYPE_CHECKING:
    from allstep.common.training.hooks import Hook
    from allstep.common.training.training_run import TrainingRun


def session(
    config: TrainConfig, placement: Placement, hooks: Sequence[Hook] = (), parts: Parts = NOTHING
) -> TrainingRun | None:
    """Build the session of this rank; None for a process that only served others, which have finished.

    `parts` are the objects with which a user's program replaces those that flags name.
    """
    # Imported only now: --help and mistakes in the flags are answered without waiting for NumPy or the framework.
    with uncollected():
        from allstep.common.recipe.noise_scale import why_not_measured
        from allstep.common.training import profiling
        from allstep.common.training.opening import open_dataset
        from allstep.common.training.same_on_ranks import agreed
        from allstep.common.training.training_run import TrainingRun
        from allstep.pytorch.models import build_network, hooks_of, set_initial_weights
        from allstep.pytorch.numerics import prepare
        from allstep.pytorch.optimizers import build_optimizer, check_parameters, embeddings_of
        from allstep.pytorch.settings import SettingsCheck
        from allstep.pytorch.worker import Worker

    prepare(config)
    strategy = strategies.create(config, placement)
    # 1. Initialise: find this rank and the others.
    strategy.init()
    # 2. One process, one device: chosen by local rank.
    device = strategy.pin_device()
    if strategy.serve():
        return None

    config = agreed(config, strategy.collectives)
    profile = profiling.hooks_of(config, strategy.placement, "pytorch")
    dataset = parts.adapt(
        open_dataset(config, strategy.placement, parts.dataset, gpu=strategy.gpu, collectives=strategy.collectives)
    )
    with strategy.scope():
        network, dataset = build_network(config, dataset, parts.model)
        flags = config.optimizer
        optimizer = parts.optimizer_or(
            lambda: build_optimizer(flags, network.parameters(), embeddings_of(network)), flags.optimizer
        )
        check_parameters(optimizer, network)
    set_initial_weights(network, config)

    # 3. Average gradients over all ranks where they are applied.
    model, optimizer = strategy.wrap(network, optimizer)
    # 4. All ranks start from rank 0's values.
    strategy.broadcast(model, optimizer)
    # 5. Train in step; rank 0 alone writes checkpoints and logs.
    measures_noise = why_not_measured(config, "pytorch") is None
    worker = Worker(network, optimizer, config, strategy, device, dataset, measures_noise=measures_noise)
    checks = [SettingsCheck(optimizer)] if hooks else []
    return TrainingRun(worker, dataset, config, strategy, [*hooks, *checks, *hooks_of(config, network), *profile])


def main(argv: Sequence[str] | None = None, hooks: Sequence[Hook] = ()) -> None:
    config, placement = start(strategies, argv)
    if config.parallel.elastic:
        elastic.train(config, lambda: session(config, placement, hooks))
    elif training := session(config, placement, hooks):
        training.train()


if __name__ == "__main__":
    run_rank(main)
