"""What each strategy costs beside a script written by hand for it, and Horovod beside the frameworks' own strategies:

    python -m allstep.benchmarks.strategies [--frameworks NAME,...] [--strategies NAME,...] [--rounds N]
                                                   [--compile]

On 2 ranks of one thread each, or 2 devices of one process (the network: cnn, 28x28x1, 64 images a rank and step), in
images/s, medians over interleaved rounds. With --compile both sides are measured with compiled steps, too, where the
strategy has them; they are compiled in the first epoch, which does not count. The exit status is 0 where all targets
are reached, 1 where one is missed.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from allstep.benchmarks.handwritten.data import trainer_flags
from allstep.commands.shared.launchers import start, train_command
from allstep.commands.shared.measure import (
    interleaved,
    median_ratio,
    print_table,
    printed_rates,
    run,
    run_handwritten,
    save,
)
from allstep.commands.shared.records.figures import Figure
from allstep.commands.shared.records.files import output_file
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES, strategy_names
from allstep.common.launch.rendezvous import free_ports
from allstep.common.process.exit import run_rank

BATCH_SIZE = 64
NUM_RANKS = 2
STEPS_PER_EPOCH, NUM_EPOCHS = 25, 4
TARGET = ">= 0.97"
# Horovod over what each framework has of its own.
RIVALS = {"pytorch": ("ddp", ">= 1.0"), "tensorflow": ("multi-worker-mirrored", ">= 1.1")}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.strategies", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument(
        "--strategies", type=listed(one_of(*strategy_names())), default=strategy_names(), metavar="NAME,..."
    )
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3, metavar="N")
    parser.add_argument("--compile", action="store_true", help="measure compiled steps, too")
    parser.add_argument("--output", type=output_file, default="runs/strategies.json", help="where samples are kept")
    flags = parser.parse_args(argv)
    rows: list[Figure] = []
    samples = {}
    with tempfile.TemporaryDirectory(prefix="allstep-strategies-") as directory:
        for framework in flags.frameworks:
            names = [name for name in STRATEGIES[framework] if name in flags.strategies]
            bench = StrategyBench(framework, Path(directory))
            sides = {"ours": bench.ours, "by hand": bench.by_hand}
            samples[framework] = interleaved(
                {
                    f"{name} {side}{' compiled' if compiled else ''}": functools.partial(
                        measure, name, compiled=compiled
                    )
                    for name in names
                    for compiled in (False, True)[: 1 + (flags.compile and _compiles(framework, name))]
                    for side, measure in sides.items()
                },
                flags.rounds,
            )
            rows += figures(framework, names, samples[framework])
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


def figures(framework: str, names: Sequence[str], rates: dict[str, list[float]]) -> list[Figure]:
    """The rows of one framework from its samples by `NAME ours` and `NAME by hand`, also with ` compiled` behind."""

    def row(what: str, ours: str, reference: str, target: str = "") -> Figure:
        one, other = rates[ours], rates[reference]
        middles = statistics.median(one), statistics.median(other)
        return Figure(f"{framework}: {what}", *middles, median_ratio(one, other), target)

    rows = [row(f"{name} / by hand", f"{name} ours", f"{name} by hand", TARGET) for name in names]
    for name in names:
        if (compiled := f"{name} ours compiled") in rates:
            rows.append(row(f"{name} --compile / by hand", compiled, f"{name} by hand compiled", TARGET))
            rows.append(row(f"{name} --compile / without", compiled, f"{name} ours"))
    rival, target = RIVALS[framework]
    if {"horovod", rival} <= set(names):
        rows.append(row(f"horovod / {rival}", "horovod ours", f"{rival} ours", target))
    return rows


class StrategyBench:
    """The measurements of one framework; each launches real jobs, in a folder of its own."""

    def __init__(self, framework: str, directory: Path) -> None:
        self._framework, self._directory = framework, directory

    def ours(self, strategy: str, *, compiled: bool = False) -> float:
        """Images per second of the trainer, the median of its epochs after the first."""
        num_ranks = _num_ranks(self._framework, strategy)
        batch = ("--global-batch-size", _global_batch_size(strategy))
        flags = (*trainer_flags(_NUM_SAMPLES, NUM_EPOCHS), *batch, *(("--compile",) if compiled else ()))
        [printed] = run(train_command(self._framework, strategy, num_ranks, flags))
        return statistics.median(printed_rates(printed))

    def by_hand(self, strategy: str, *, compiled: bool = False) -> float:
        """Images per second of the script written for the strategy."""
        commands = functools.partial(handwritten, self._framework, strategy, compiled=compiled)
        return statistics.median(run_handwritten(self._directory, commands).images_per_second[1:])


_NUM_SAMPLES = STEPS_PER_EPOCH * BATCH_SIZE * NUM_RANKS


def _num_ranks(framework: str, strategy: str) -> int:
    if strategy == "parameter-server":
        return NUM_RANKS + 1  # the chief does not train
    return NUM_RANKS if STRATEGIES[framework][strategy].can_have(NUM_RANKS) else 1


def _global_batch_size(strategy: str) -> int:
    one_process = strategy in ("single", "data-parallel", "parameter-server")
    return BATCH_SIZE if one_process else BATCH_SIZE * NUM_RANKS


def _compiles(framework: str, strategy: str) -> bool:
    return "compile" in STRATEGIES[framework][strategy].flags


def handwritten(framework: str, strategy: str, output: Path, *, compiled: bool = False) -> list[list[str]]:
    """The commands, to be run at the same time, of the script that stands beside a strategy."""
    module = f"allstep.benchmarks.handwritten.{framework}_"
    flags = ["--num-samples", str(_NUM_SAMPLES), "--epochs", str(NUM_EPOCHS), *["--compile"] * compiled, "--batch-size"]
    if strategy == "horovod":
        return [[*start("horovodrun", NUM_RANKS), "-m", f"{module}horovod", str(output), *flags, str(BATCH_SIZE)]]
    script = ["-m", f"{module}strategies", strategy, str(output), *flags]
    if framework == "pytorch":
        batch_size = BATCH_SIZE * NUM_RANKS if strategy == "model-parallel" else BATCH_SIZE
        alone = strategy in ("single", "data-parallel")
        return [[*start(None if alone else "torchrun", NUM_RANKS), *script, str(batch_size)]]
    if strategy in ("mirrored", "central-storage"):
        return [["python", *script, str(BATCH_SIZE * NUM_RANKS), "--num-devices", str(NUM_RANKS)]]
    if strategy == "single":
        return [["python", *script, str(BATCH_SIZE)]]
    with free_ports(NUM_RANKS + 2) as ports:
        addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster: dict[str, list[str]] = {"worker": addresses[:NUM_RANKS]}
    if strategy == "parameter-server":
        cluster |= {"chief": [addresses[-1]], "ps": [addresses[-2]]}
    tasks = [(role, index) for role in cluster if role != "ps" for index in range(len(cluster[role]))]
    return [
        [
            *("env", f"TF_CONFIG={json.dumps({'cluster': cluster, 'task': {'type': role, 'index': index}})}"),
            *("python", *script, str(BATCH_SIZE)),
        ]
        for role, index in tasks
    ]


if __name__ == "__main__":
    run_rank(main)
