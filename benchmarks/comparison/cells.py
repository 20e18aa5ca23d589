"""The cells of a comparison: what is trained, by whom, on how many ranks, and the commands that launch it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from allstep.benchmarks.harness.launchers import train_command
from allstep.common.files.records import Count
from allstep.common.files.schema import one_of
from allstep.common.models import entry_of
from allstep.common.registry import STRATEGIES, StrategyEntry

INDEPENDENT = "independent"
"""So many single processes at once, without communication: on one rank the plain program, on more the machine's own
limit."""
WORKLOADS = ("synthetic-weak", "synthetic-strong", "real-weak", "real-strong")
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
_A_DAY = 24 * 60 * 60


def synthetic_images(model: str) -> tuple[str | int, ...]:
    """Flags for images and classes of the size for which the network was designed."""
    entry = entry_of(model)
    return "--synthetic-shape", *entry.benchmark_image, "--synthetic-classes", entry.benchmark_classes


@dataclass(frozen=True)
class Settings:
    """What all cells have in common; a results directory holds cells of one setting alone."""

    num_warmup_batches: int
    """Synthetic input: steps before the clock."""
    num_batches_per_iter: Count
    """Synthetic input: steps that are timed together."""
    num_iters: int
    """Synthetic input: timed blocks of one launch."""
    dataset: str
    """Real input."""
    data_dir: str | None
    epochs: int
    """Real input: of one launch, the first included, which warms up."""
    base_lr: float
    target_accuracy: float
    """Real input: validation accuracy, in 0..1, the time to which is reported."""
    gate_steps: int
    """Steps over which curves are compared."""
    threads_per_rank: int
    turns: bool
    """Whether the cells of a table are launched together and take turns, block by block."""
    slices: Count | None = None
    """Into how many slices a global batch is cut, by the strategies that can."""
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu"
    """Where all cells train: on CPUs, or with a GPU for each rank."""


@dataclass(frozen=True)
class Cell:
    """One place in the table."""

    DERIVED: ClassVar[tuple[str, ...]] = ("id", "input", "scaling", "global_batch_size")

    workload: Annotated[str, one_of(*WORKLOADS)]
    """Input (synthetic: compute only; real: a data set through the input pipeline) and scaling (weak: the same batch a
    rank; strong: the same global batch)."""
    framework: str
    strategy: str
    """One of the trainers', or INDEPENDENT."""
    ranks: Count
    model: str
    batch_size: Count
    """Samples a step on one rank."""
    precision: str
    """One of the trainers'."""
    compiled: bool = False
    """Whether it trains with --compile."""

    @property
    def table(self) -> tuple[str, str, int, str]:
        """What the cells of one table have in common."""
        return self.workload, self.model, self.batch_size, self.arithmetic

    @property
    def place(self) -> tuple[str, str, str, int, str, int]:
        """What the cells that are ranked against each other have in common."""
        return self.workload, self.framework, self.model, self.batch_size, self.arithmetic, self.ranks

    @property
    def id(self) -> str:
        parts = (self.workload, self.framework, self.strategy, self.ranks, self.model, self.batch_size, self.precision)
        return ".".join((*map(str, parts), *(["compiled"] if self.compiled else [])))

    @property
    def arithmetic(self) -> str:
        """How its steps are computed, in words."""
        return f"{self.precision}, compiled" if self.compiled else self.precision

    @property
    def input(self) -> str:
        return self.workload.partition("-")[0]

    @property
    def scaling(self) -> str:
        return self.workload.partition("-")[2]

    @property
    def global_batch_size(self) -> int:
        """Samples a step over all ranks; where updates are asynchronous, of one update."""
        many = self.scaling == "weak" and strategy_entry(self).synchronous
        return self.batch_size * (self.ranks if many else 1)


def trainers_name(strategy: str) -> str:
    """What the trainers call a strategy of ours."""
    return "single" if strategy == INDEPENDENT else strategy


def strategy_entry(cell: Cell) -> StrategyEntry:
    """How the trainers start a cell's strategy."""
    return STRATEGIES[cell.framework][trainers_name(cell.strategy)]


def slices_of(cell: Cell, settings: Settings) -> int | None:
    """With how many --slices a cell trains; of independent processes, each."""
    if settings.slices is None or "slices" not in strategy_entry(cell).flags:
        return None
    return max(1, settings.slices // cell.ranks) if cell.strategy == INDEPENDENT else settings.slices


def matrix(
    workloads: Sequence[str],
    frameworks: Sequence[str],
    strategies: Sequence[str],
    ranks: Sequence[int],
    models: Sequence[str],
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    *,
    compilations: Sequence[bool] = (False,),
) -> list[Cell]:
    """All cells, in the order of the table, of the strategies that a framework has, on as many ranks as they can have.

    INDEPENDENT is there in any case, since the others are compared with it, and so is one rank.

    Args:
        compilations: whether steps are compiled; strategies that cannot are left out of those tables.
    """
    strategies = (INDEPENDENT, *(name for name in strategies if name != INDEPENDENT))
    ranks = sorted({1, *ranks})
    cells = []
    tables = itertools.product(workloads, models, batch_sizes, precisions, compilations)
    for workload, model, batch_size, precision, compiled in tables:
        for framework, strategy, number in itertools.product(frameworks, strategies, ranks):
            cell = Cell(workload, framework, strategy, number, model, batch_size, precision, compiled)
            if strategy == INDEPENDENT or (strategy in STRATEGIES[framework] and _can_be(cell)):
                cells.append(cell)
    return list(dict.fromkeys(cells))


def _can_be(cell: Cell) -> bool:
    entry = strategy_entry(cell)
    return entry.can_have(cell.ranks) and (not cell.compiled or "compile" in entry.flags)


def commands(
    cell: Cell, settings: Settings, folder: Path, *, turns: Path | None = None
) -> tuple[list[list[str]], list[Path]]:
    """The commands of a cell's launch, to be run at once, and the files that they will write in `folder`.

    Args:
        turns: the socket where the ranks are to wait for their turns.
    """
    number = cell.ranks if cell.strategy == INDEPENDENT else 1
    outputs = [folder / f"output-{process}.json" for process in range(number)]
    batch = cell.global_batch_size // number
    waiting = ("--turns", turns) if turns else ()
    trained = ("--framework", cell.framework, "--global-batch-size", batch, "--precision", cell.precision)
    trained += ("--compile",) if cell.compiled else ()
    trained += ("--slices", slices) if (slices := slices_of(cell, settings)) else ()
    flags = (*training_flags(cell.input, cell.model, settings), *trained, "--device", settings.device)
    module = "allstep.benchmarks.synthetic" if cell.input == "synthetic" else "allstep.benchmarks.comparison.real"
    strategy, ranks = trainers_name(cell.strategy), cell.ranks // number
    launches = [
        train_command(cell.framework, strategy, ranks, (*flags, *waiting, "--output", output), module=module)
        for output in outputs
    ]
    if number > 1 and settings.device == "cuda":  # each by itself would take the first GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
        pairs = zip(visible.split(","), launches, strict=False)  # a cell of more processes than GPUs is not launched
        launches = [["env", f"CUDA_VISIBLE_DEVICES={gpu}", *one] for gpu, one in pairs]
    return launches, outputs


def training_flags(kind: str, model: str, settings: Settings) -> tuple[object, ...]:
    """The flags that say what a rank trains, on which images and for how long."""
    if kind == "synthetic":
        return (
            *("--model", model, *synthetic_images(model)),
            *("--num-warmup-batches", settings.num_warmup_batches),
            *("--num-batches-per-iter", settings.num_batches_per_iter),
            *("--num-iters", settings.num_iters),
        )
    data_dir = ("--data-dir", settings.data_dir) if settings.data_dir else ()
    return (
        *("--model", model, "--dataset", settings.dataset, *data_dir),
        *("--epochs", settings.epochs, "--base-lr", settings.base_lr),
        # A rank that is stopped where it is not its turn is neither lost nor stuck.
        *(("--fault-timeout", _A_DAY, "--stall-timeout", 0) if settings.turns else ()),
    )
