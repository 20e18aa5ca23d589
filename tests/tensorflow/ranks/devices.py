"""Compare strategies of one process on three CPU devices with `single` for each optimizer, and print `all right`.

Oracles: `Single` on the same batches; for the replica check, a modified copy of a weight.
"""

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# A process cannot change its number of threads later, so use all cores for any number of devices.
os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))

import keras
import numpy as np

from allstep.commands.parity.curves import weights_apart
from allstep.common.base.errors import Fault
from allstep.common.config.train_config import OptimizerConfig, StrategyConfig, TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.data.loader import Batch
from allstep.common.data.sharding import Position
from allstep.common.exact.replica_check import check_replicas_equal
from allstep.common.launch.placement import ALONE
from allstep.common.recipe.weights import initial_weights
from allstep.tensorflow.models import build_model, export_weights, import_weights
from allstep.tensorflow.optimizers import build_optimizer
from allstep.tensorflow.strategies.distribute import CentralStorage, Mirrored
from allstep.tensorflow.strategies.strategy import Single, Strategy
from allstep.tensorflow.worker import Worker

DATASET = Dataset(None, None, (8, 8, 1), 10, mean=(0.3,), std=(0.4,))
OPTIMIZERS = {
    "sgd": OptimizerConfig(momentum=0.0, weight_decay=0.01),
    "nesterov": OptimizerConfig(optimizer="nesterov", weight_decay=0.01),
    "adam": OptimizerConfig(optimizer="adam", weight_decay=0.01),
    "adamw": OptimizerConfig(optimizer="adamw", weight_decay=0.01),
}


def make_worker(kind: type[Strategy], flags: OptimizerConfig, accumulate_steps: int = 1) -> Worker:
    strategy = kind(ALONE, StrategyConfig(num_devices=3))
    strategy.init()
    device = strategy.pin_device()
    with strategy.scope():
        model = build_model("mlp", DATASET.input_shape, 10)
        if flags.optimizer == "sgd":  # which the devices apply by themselves
            model.trainable_variables[0].constraint = keras.constraints.MaxNorm(0.3)
        optimizer = build_optimizer(flags)
        optimizer.build(model.trainable_variables)
    import_weights(model, initial_weights({name: one.shape for name, one in export_weights(model).items()}, seed=3))
    model, optimizer = strategy.wrap(model, optimizer)
    config = TrainConfig(optimizer=flags, parallel=StrategyConfig(accumulate_steps=accumulate_steps))
    return Worker(model, optimizer, config, strategy, device, DATASET)


def batches() -> list[Batch]:
    """Return batches whose sizes are not multiples of devices and passes, one of them smaller than the devices."""
    random = np.random.default_rng(5)
    return [
        Batch(
            inputs=random.integers(0, 256, (size, 8, 8, 1), np.uint8),
            targets=random.integers(0, 10, size),
            num_samples=size,
            num_global=size,
            loss_weight=1 / size,
            position=Position(0, 0),
        )
        for size in (32, 31, 64, 7, 2)
    ]


def train(worker: Worker, learning_rate: float) -> list[float]:
    return [float(worker.train_step(batch, learning_rate)) for batch in batches()]


mirrored = None
for name, config in OPTIMIZERS.items():
    rate = 0.001 if name.startswith("adam") else 0.05
    # The first strategy sets the number of devices, which cannot change later.
    workers = [make_worker(Mirrored, config), make_worker(CentralStorage, config)]
    if name == "nesterov":
        workers.append(make_worker(Mirrored, config, accumulate_steps=2))
    single = make_worker(Single, config)
    expected = train(single, rate)
    for worker in workers:
        np.testing.assert_allclose(train(worker, rate), expected, rtol=1e-5)
        apart = weights_apart(single.export_state(), worker.export_state())
        assert apart <= 1e-5, (name, type(worker._strategy).__name__, apart)
        for batch in batches():
            losses, outputs = worker.eval_step(batch)
            expected_losses, expected_outputs = single.eval_step(batch)
            np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
            np.testing.assert_allclose(outputs, expected_outputs, rtol=1e-4, atol=1e-5)
        check_replicas_equal(worker.parameters(), worker.collectives, "at the end")
    mirrored = workers[0]

copies = [name for name, _ in mirrored.parameters()]
assert copies[:4] == ["fc1.weight"] * 3 + ["fc1.bias"], copies
mirrored_variable = mirrored._model.trainable_variables[2].value
variable = mirrored._strategy.strategy.experimental_local_results(mirrored_variable)[1]
variable.assign(variable + 1e-6)
try:
    check_replicas_equal(mirrored.parameters(), mirrored.collectives, "after step 6")
except Fault as fault:
    assert str(fault) == "out of step after step 6: the devices of rank 0 differ in fc2.weight", fault
else:
    raise AssertionError("a drifted device went unseen")
print("all right")
