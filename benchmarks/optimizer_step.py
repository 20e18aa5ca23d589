"""What a step of each optimizer costs on the weights of a ResNet-50, beside one of SGD with momentum:

    OMP_NUM_THREADS=1 python -m allstep.benchmarks.optimizer_step [--frameworks pytorch] [--rounds N]

In milliseconds, on the GPU where there is one, else on one core; both with weight decay, without gradients being
computed. Medians over interleaved rounds. The exit status is 0 where all targets are reached, 1 where one is missed.
PyTorch's SGD is the one that it chooses itself, of many operations; the trainers' is fused.

LAMB is at its target on a CPU, on one side or the other by what else runs: docs/batches.md says what was tried. Adam is
shown beside them. A GPU was not at hand.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from allstep.commands.shared.measure import Figure, interleaved, job, median_ratio, print_table, run, save
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.base.memory import keep_freed_memory
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.config.train_config import OptimizerConfig
from allstep.common.process.exit import run_rank

TARGETS = {"lars": "<= 1.5", "novograd": "<= 1.5", "lamb": "<= 1.5", "adam": ""}
REFERENCE = "sgd"
IMAGE_SHAPE, NUM_CLASSES = (224, 224, 3), 1000
WEIGHT_DECAY, LEARNING_RATE = 1e-4, 1e-3
STEPS_A_ROUND = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.optimizer_step", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=7, metavar="N")
    parser.add_argument("--output", type=output_file, default="runs/optimizer_step.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    rows: list[Figure] = []
    samples = {}
    for framework in flags.frameworks:  # each in a process of its own
        [printed] = run(job(__spec__.name, "measure", framework, flags.rounds, num_ranks=None))
        samples[framework] = json.loads(printed.splitlines()[-1])
        reference = samples[framework][REFERENCE]
        rows += [
            Figure(
                f"{framework} {name}, ms a step",
                1e3 * statistics.median(samples[framework][name]),
                1e3 * statistics.median(reference),
                median_ratio(samples[framework][name], reference),
                target,
            )
            for name, target in TARGETS.items()
        ]
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def measure(framework: str, num_rounds: int) -> None:
    """Print the seconds a step of each optimizer as JSON, by name."""
    keep_freed_memory()  # as a trainer does
    prepare = {"pytorch": in_pytorch, "tensorflow": in_tensorflow}[framework]()
    steps = {
        name: prepare(OptimizerConfig(optimizer=cast("Any", name), weight_decay=WEIGHT_DECAY))
        for name in (REFERENCE, *TARGETS)
    }
    for step in steps.values():  # makes the slots
        step()

    def seconds(step: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(STEPS_A_ROUND):
            step()
        return (time.perf_counter() - started) / STEPS_A_ROUND

    samples = interleaved({name: lambda step=step: seconds(step) for name, step in steps.items()}, num_rounds)
    print(json.dumps(samples))


def in_pytorch() -> Callable[[OptimizerConfig], Callable[[], None]]:
    """What makes a step of an optimizer, that takes effect before it returns."""
    import torch

    from allstep.pytorch.models import build_model
    from allstep.pytorch.optimizers import build_optimizer, without_fused_kernels

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parameters = list(build_model("resnet50", IMAGE_SHAPE, NUM_CLASSES).to(device).parameters())

    def prepare(config: OptimizerConfig) -> Callable[[], None]:
        optimizer = build_optimizer(config, parameters)
        if config.optimizer == "sgd":
            without_fused_kernels(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE

        def step() -> None:
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return step

    generator = torch.Generator(device).manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device) / 100
    return prepare


def in_tensorflow() -> Callable[[OptimizerConfig], Callable[[], None]]:
    """The same in TensorFlow, one graph a step."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    from allstep.tensorflow.models import build_model
    from allstep.tensorflow.optimizers import build_optimizer

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    variables = build_model("resnet50", IMAGE_SHAPE, NUM_CLASSES).trainable_variables
    random = np.random.default_rng(0)
    gradients = [tf.constant(random.standard_normal(one.shape, np.float32) / 100) for one in variables]

    def prepare(config: OptimizerConfig) -> Callable[[], None]:
        optimizer = build_optimizer(config)
        optimizer.build(variables)
        optimizer.learning_rate = LEARNING_RATE
        apply = tf.function(lambda gradients: optimizer.apply(gradients, variables), autograph=False)

        def step() -> None:
            apply(gradients)
            tf.test.experimental.sync_devices()

        return step

    return prepare


def dispatch() -> None:
    """The command itself, or the measurement in one framework, which it starts."""
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], int(sys.argv[3]))
    else:
        main()


if __name__ == "__main__":
    run_rank(dispatch)
