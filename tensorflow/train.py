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

from allstep.common.api.user_parts import NOTHING, Parts
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.placement import Placement
from allstep.common.process.exit import run_rank
from allstep.common.process.lean_import import lean_import
from allstep.common.training import elastic
from allstep.common.training.start import start
from allstep.tensorflow import strategies

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
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with lean_import():
        from allstep.common.recipe.noise_scale import why_not_measured
        from allstep.common.training import profiling
        from allstep.common.training.opening import open_dataset
        from allstep.common.training.same_on_ranks import agreed
        from allstep.common.training.training_run import TrainingRun
        from allstep.tensorflow.models import build_network, hooks_of, policy_of, set_initial_weights
        from allstep.tensorflow.numerics import check_graphs, check_settings, check_strategy, prepare
        from allstep.tensorflow.optimizers import build_optimizer, check_parameters
        from allstep.tensorflow.settings import SettingsCheck
        from allstep.tensorflow.worker import Worker

    prepare(config)
    strategy = strategies.create(config, placement)
    # 1. Initialise: find this rank and the others.
    strategy.init()
    # 2. One process, one device: chosen by local rank.
    device = strategy.pin_device()
    if strategy.serve():
        return None

    config = agreed(config, strategy.collectives)
    profile = profiling.hooks_of(config, strategy.placement, "tensorflow")
    dataset = parts.adapt(
        open_dataset(config, strategy.placement, parts.dataset, gpu=strategy.gpu, collectives=strategy.collectives)
    )
    check_settings(policy_of(config), "float32")
    check_strategy()
    with strategy.scope():
        model, dataset = build_network(config, dataset, parts.model)
        flags = config.optimizer
        check_graphs()
        optimizer = parts.optimizer_or(lambda: build_optimizer(flags), flags.optimizer)
        check_parameters(optimizer, model)
        optimizer.build(model.trainable_variables)
    set_initial_weights(model, config)

    # 3. Average gradients over all ranks where they are applied.
    model, optimizer = strategy.wrap(model, optimizer)
    # 4. All ranks start from rank 0's values.
    strategy.broadcast(model, optimizer)
    # 5. Train in step; rank 0 alone writes checkpoints and logs.
    measures_noise = why_not_measured(config, "tensorflow") is None
    worker = Worker(model, optimizer, config, strategy, device, dataset, measures_noise=measures_noise)
    checks = [SettingsCheck(model, optimizer)] if hooks else []
    return TrainingRun(worker, dataset, config, strategy, [*hooks, *checks, *hooks_of(config, model), *profile])


def main(argv: Sequence[str] | None = None, hooks: Sequence[Hook] = ()) -> None:
    config, placement = start(strategies, argv)
    if config.parallel.elastic:
        elastic.train(config, lambda: session(config, placement, hooks))
    elif training := session(config, placement, hooks):
        training.train()


if __name__ == "__main__":
    run_rank(main)
