"""Compare frameworks and strategies on this machine: images/s, scaling, time to accuracy, memory and start-up.

    allstep compare
    allstep compare --frameworks pytorch,tensorflow --strategies horovod,ddp --ranks 1,2 --output-dir DIR

Every cell (framework x strategy x ranks x model x batch size x precision, compiled or not) is launched by its real
launcher several times, after a gate that excludes cells with a different training curve. The cells of a table take
turns, block by block. The output directory keeps every raw sample, the statistics and all rules of the comparison
(compare.json); allstep report makes pages of it. The same command again resumes an interrupted comparison in its round,
and measures failed cells again.

The strategy `independent` is always included: single processes without communication, one per rank. A strategy that
only one framework has is measured in that framework.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from allstep.commands.compare.cells import INDEPENDENT, PRECISIONS, WORKLOADS, Settings, matrix
from allstep.commands.compare.measuring import Comparison
from allstep.commands.compare.table import MIN_REPETITIONS, print_tables
from allstep.commands.shared import machine
from allstep.commands.shared.records.files import command
from allstep.common.base.errors import Fault, warn
from allstep.common.base.flag_types import (
    MAX_ROUNDS,
    WEEK,
    Parser,
    listed,
    local_ranks,
    max_local_ranks,
    nonempty_path,
    nonempty_text,
    number,
    one_of,
    whole,
)
from allstep.common.catalog.networks import check_frameworks, check_model, image_model_name
from allstep.common.catalog.strategies import FRAMEWORKS, strategy_names
from allstep.common.checkpoint import OutputDirectory
from allstep.common.config.data_config import DatasetName
from allstep.common.process.requirements import need_frameworks

STRATEGIES = (INDEPENDENT, *(name for name in strategy_names() if name != "single"))
DEFAULT_STRATEGIES = (INDEPENDENT, "horovod", "ddp", "multi-worker-mirrored")
BUSY = 0.5  # load average
EPOCHS = 27  # of digits, which takes about 50 ms: more than a second on the clock in every launch
# A check within a minute that everything works; the figures mean nothing.
QUICK = {
    "repetitions": 1,
    **dict.fromkeys(("num_warmup_batches", "num_batches_per_iter", "num_iters"), 2),
    **{"epochs": 2, "gate_steps": 3},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the missing samples, write the results and print the tables."""
    parser = _parser()
    flags = parser.parse_args(argv)
    # Without --oversubscribe, cells with more ranks than cores are reported as unavailable and not launched.
    if flags.oversubscribe and max(flags.ranks) > max_local_ranks():
        parser.error(
            f"expected --ranks to be at most {max_local_ranks()} with --oversubscribe on this machine, received "
            f"{max(flags.ranks)}; lower it"
        )
    minimum = max(*flags.ranks, 1)
    maximum = min(flags.batch_sizes)
    if flags.slices is not None and not minimum <= flags.slices <= maximum:
        parser.error(
            f"expected --slices to be {minimum}, the most ranks, to {maximum}, the smallest batch, received "
            f"{flags.slices}; take another number, or change --ranks or --batch-sizes"
        )
    if flags.quick:
        vars(flags).update(QUICK)
    if flags.device == "auto":
        flags.device = "cuda" if machine.num_visible_gpus() else "cpu"
    if flags.device == "cuda" and not machine.num_visible_gpus():
        parser.error("expected a GPU with --device cuda, received a machine that shows none; give --device cpu")
    names = STRATEGIES if "all" in flags.strategies else flags.strategies
    for model in flags.models:
        check_frameworks(model, flags.frameworks)
        for framework in flags.frameworks:
            check_model(model, framework)
    need_frameworks(flags.frameworks, by="allstep compare")
    what = flags.models, flags.batch_sizes, flags.precisions
    compilations = (False, True) if flags.compile else (False,)
    cells = matrix(flags.workloads, flags.frameworks, names, flags.ranks, *what, compilations=compilations)
    fields = [item.name for item in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(flags, name) for name in fields})
    load = os.getloadavg()[0]
    if load > BUSY:
        warn(f"this machine has other work (load {load:.1f}): figures suffer, most of all those of several ranks")
    with OutputDirectory(flags.output_dir, warn=warn) as output:
        comparison = Comparison(
            output.path,
            cells,
            settings,
            num_rounds=flags.repetitions,
            time_limit=flags.time_limit,
            command=command("compare", argv),
            oversubscribe=flags.oversubscribe,
        )
        comparison.run()
        summary = comparison.write(finished=True)
    print_tables(summary.cells, summary.rules)
    print(f"written to {output.path}: allstep report {output.path} makes pages of it")
    if not any(cell.images_per_second for cell in summary.cells):
        raise Fault("no cell could be measured; the notes in the table say why")


def _parser() -> Parser:
    parser = Parser("allstep compare", __doc__)
    add = parser.add_argument
    add("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    names = f"default: {','.join(DEFAULT_STRATEGIES)}; all: every strategy that this machine can run"
    strategy = listed(one_of(*STRATEGIES, "all"))
    add("--strategies", type=strategy, default=DEFAULT_STRATEGIES, metavar="NAME,...", help=names)
    ranks = listed(whole(1, 10_000, "more cores than any machine has"))
    default_ranks = (1, 2) if len(os.sched_getaffinity(0)) > 1 else (1,)
    add("--ranks", type=ranks, default=default_ranks, metavar="N,...", help="one rank is always measured")
    device = "device of all cells: cuda, with a GPU for each rank, or cpu; auto: cuda if there are GPUs"
    add("--device", type=one_of("auto", "cpu", "cuda"), default="auto", help=device)
    add("--oversubscribe", action="store_true", help="also measure more ranks than cores, which then share them")
    models = "as the trainers' --model: the suite's, a library's, or your FILE.py:FUNCTION"
    add("--models", type=listed(image_model_name), default=("cnn",), metavar="NAME,...", help=models)
    add("--batch-sizes", type=listed(whole(1, 2**20)), default=(64,), metavar="N,...", help="samples per step and rank")
    precisions = f"as the trainers' --precision: {', '.join(PRECISIONS)}"
    add("--precisions", type=listed(one_of(*PRECISIONS)), default=PRECISIONS[:1], metavar="NAME,...", help=precisions)
    add("--compile", action="store_true", help="also measure compiled steps, in separate tables")
    slices = "as the trainers' --slices: all curves of a framework must then have the same bits"
    add("--slices", type=whole(1, 2**12), metavar="V", help=slices)
    add("--workloads", type=listed(one_of(*WORKLOADS)), default=("synthetic-weak", "real-strong"), metavar="NAME,...")
    add("--repetitions", type=whole(MIN_REPETITIONS, MAX_ROUNDS), default=MIN_REPETITIONS, metavar="N")
    add("--num-warmup-batches", type=whole(1, 10**6), default=5, metavar="N")
    add("--num-batches-per-iter", type=whole(1, 10**6), default=4, metavar="N")
    add("--num-iters", type=whole(1, 10**6), default=8, metavar="N", help="timed blocks of batches in a launch")
    add("--dataset", type=one_of(*get_args(DatasetName)), default="digits", metavar="NAME", help="the real input")
    add("--data-dir", type=nonempty_text, metavar="DIR")
    add("--epochs", type=whole(2, 10**6), default=EPOCHS, metavar="N", help="epochs of real input; the first warms up")
    add("--base-lr", type=number(0, 1e30, above=True), default=0.02, metavar="RATE", help="rate on real input")
    accuracy = number(0, 1, above=True)
    add("--target-accuracy", type=accuracy, default=0.97, metavar="SHARE", help="accuracy on real input, in 0..1")
    add("--gate-steps", type=whole(1, 10**6), default=10, metavar="N", help="steps over which curves are compared")
    add("--threads-per-rank", type=local_ranks(), default=1, metavar="N")
    turns = (
        "launch the cells of a table together and run them in turn, block by block; --no-turns: launch one after the "
        "other, for jobs that need all memory or a whole GPU"
    )
    add("--turns", action=argparse.BooleanOptionalAction, default=True, help=turns)
    add("--time-limit", type=whole(1, WEEK), default=300, metavar="SECONDS", help="limit of a launch, without waiting")
    add("--quick", action="store_true", help="measure very little, once, to check that everything works")
    add("--output-dir", type=nonempty_path, default=Path("runs/compare"), metavar="DIR")
    return parser
