"""The cells of a comparison: what is launched, by which commands, and why this machine cannot run some of them."""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from allstep.commands.shared.jobs import environment, train_command
from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import Fault, UserError
from allstep.common.catalog.networks import entry_of
from allstep.common.catalog.strategies import STRATEGIES, StrategyEntry
from allstep.common.files.strict_json import Count, one_of

INDEPENDENT = "independent"
"""Simultaneous single processes without communication, one per rank: on one rank the plain program, on several ranks
the machine's own limit."""
WORKLOADS = ("synthetic-weak", "synthetic-strong", "real-weak", "real-strong")
PRECISIONS = ("float32", "tf32", "bf16", "fp16")
_A_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class Settings:
    """Settings that all cells have in common; a results directory holds cells of only one setting."""

    num_warmup_batches: int
    """Synthetic input: steps before the clock starts."""
    num_batches_per_iter: Count
    """Synthetic input: steps that are timed together."""
    num_iters: int
    """Synthetic input: timed blocks in a launch."""
    dataset: str
    """Real input: name of the data set."""
    data_dir: str | None
    epochs: int
    """Real input: epochs in a launch, including the first one, which warms up."""
    base_lr: float
    target_accuracy: float
    """Real input: validation accuracy, in 0..1; the time to reach it is reported."""
    gate_steps: int
    """Steps over which curves are compared."""
    threads_per_rank: int
    turns: bool
    """Whether the cells of a table are launched together and take turns, block by block."""
    slices: Count | None = None
    """Number of slices of a global batch, for strategies that have --slices."""
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu"
    """Device of all cells: CPUs, or a GPU for each rank."""


@dataclass(frozen=True)
class Cell:
    """One row of a table."""

    DERIVED: ClassVar[tuple[str, ...]] = ("id", "input", "scaling", "global_batch_size")

    workload: Annotated[str, one_of(*WORKLOADS)]
    """Input (synthetic: compute only; real: a data set through the input pipeline) and scaling (weak: the same batch
    per rank; strong: the same global batch)."""
    framework: str
    strategy: str
    """A strategy of the trainers, or INDEPENDENT."""
    ranks: Count
    model: str
    batch_size: Count
    """Samples per step on each rank."""
    precision: str
    """A precision of the trainers."""
    compiled: bool = False
    """Whether it trains with --compile."""

    @property
    def table(self) -> tuple[str, str, int, str]:
        """Key that the cells of one table share."""
        return self.workload, self.model, self.batch_size, self.arithmetic

    @property
    def ranking(self) -> tuple[str, str, str, int, str, int]:
        """Key of the ranking that the cell takes part in."""
        return self.workload, self.framework, self.model, self.batch_size, self.arithmetic, self.ranks

    @property
    def id(self) -> str:
        parts = (self.workload, self.framework, self.strategy, self.ranks, self.model, self.batch_size, self.precision)
        return ".".join((*map(str, parts), *(["compiled"] if self.compiled else [])))

    @property
    def arithmetic(self) -> str:
        """Precision, and whether steps are compiled, in words."""
        return f"{self.precision}, compiled" if self.compiled else self.precision

    @property
    def input(self) -> str:
        return self.workload.partition("-")[0]

    @property
    def scaling(self) -> str:
        return self.workload.partition("-")[2]

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks; per update if updates are asynchronous."""
        many = self.scaling == "weak" and strategy_entry(self).synchronous
        return self.batch_size * (self.ranks if many else 1)


def trainers_name(strategy: str) -> str:
    """Return the trainers' name of a strategy."""
    return "single" if strategy == INDEPENDENT else strategy


def strategy_entry(cell: Cell) -> StrategyEntry:
    """Return the entry of a cell's strategy in the trainers' registry."""
    return STRATEGIES[cell.framework][trainers_name(cell.strategy)]


def slices_of(cell: Cell, settings: Settings) -> int | None:
    """Return the --slices of a cell, or of each process if they are independent; None without them."""
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
    """Return all cells in the order of the table, without combinations that a framework or strategy does not support.

    INDEPENDENT and one rank are always included, since the others are compared with them. `compilations` tells whether
    steps are compiled; strategies that cannot compile are left out of those tables.
    """
    strategies = (INDEPENDENT, *(name for name in strategies if name != INDEPENDENT))
    ranks = sorted({1, *ranks})
    cells = []
    tables = itertools.product(workloads, models, batch_sizes, precisions, compilations)
    for workload, model, batch_size, precision, compiled in tables:
        for framework, strategy, number in itertools.product(frameworks, strategies, ranks):
            cell = Cell(workload, framework, strategy, number, model, batch_size, precision, compiled)
            entry = STRATEGIES[framework].get(trainers_name(strategy))
            can_be = entry and entry.can_have(number) and (not compiled or "compile" in entry.flags)
            if strategy == INDEPENDENT or can_be:
                cells.append(cell)
    return list(dict.fromkeys(cells))


def commands(
    cell: Cell, settings: Settings, folder: Path, *, turns: Path | None = None
) -> tuple[list[list[str]], list[Path]]:
    """Return the commands of a cell's launch, which run at the same time, and the files that they write to `folder`.

    `turns` is the socket on which the ranks wait for their turns.
    """
    number = cell.ranks if cell.strategy == INDEPENDENT else 1
    outputs = [folder / f"output-{process}.json" for process in range(number)]
    flags = [*training_flags(cell.input, cell.model, settings), "--framework", cell.framework]
    flags += ["--global-batch-size", cell.global_batch_size // number, "--precision", cell.precision]
    if cell.compiled:
        flags.append("--compile")
    if slices := slices_of(cell, settings):
        flags += ["--slices", slices]
    flags += ["--device", settings.device, *(["--turns", turns] if turns else [])]
    module = "allstep.commands.compare.synthetic" if cell.input == "synthetic" else "allstep.commands.shared.real"
    strategy, ranks = trainers_name(cell.strategy), cell.ranks // number
    launches = [
        train_command(cell.framework, strategy, ranks, [*flags, "--output", output], module=module)
        for output in outputs
    ]
    if number > 1 and settings.device == "cuda":  # otherwise each would take the first GPU
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
        if len(gpus := visible.split(",")) < number:
            raise UserError(
                f"expected {number} GPUs for {number} processes, received CUDA_VISIBLE_DEVICES={visible}; list more"
            )
        pairs = zip(gpus, launches, strict=False)
        launches = [["env", f"CUDA_VISIBLE_DEVICES={gpu}", *one] for gpu, one in pairs]
    return launches, outputs


def training_flags(kind: str, model: str, settings: Settings) -> tuple[object, ...]:
    """Return the flags that set what a rank trains, on which images and for how long."""
    if kind == "synthetic":
        designed_for = entry_of(model)
        return (
            *("--model", model, "--synthetic-shape", *designed_for.benchmark_image),
            *("--synthetic-classes", designed_for.benchmark_classes),
            *("--num-warmup-batches", settings.num_warmup_batches),
            *("--num-batches-per-iter", settings.num_batches_per_iter),
            *("--num-iters", settings.num_iters),
        )
    data_dir = ("--data-dir", settings.data_dir) if settings.data_dir else ()
    return (
        *("--model", model, "--dataset", settings.dataset, *data_dir),
        *("--epochs", settings.epochs, "--base-lr", settings.base_lr),
        # A rank that is stopped between its turns is neither lost nor stuck.
        *(("--fault-timeout", _A_DAY, "--stall-timeout", 0) if settings.turns else ()),
    )


def unavailable(
    cells: Sequence[Cell], *, oversubscribe: bool = False, num_gpus: int | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the id of each cell that this machine cannot run, and why.

    Args:
        oversubscribe: whether ranks may share cores.
        num_gpus: GPUs of this machine, one for each rank; None if all cells train on CPUs.
    """
    num_cores, path = len(os.sched_getaffinity(0)), environment()["PATH"]
    reasons = {framework: _reasons(framework) for framework in dict.fromkeys(cell.framework for cell in cells)}
    for cell in cells:
        start = strategy_entry(cell)
        if reason := reasons[cell.framework].get(trainers_name(cell.strategy)):
            yield cell.id, reason
        elif start.launcher and shutil.which(start.launcher, path=path) is None:
            yield cell.id, f"expected {start.launcher} on the path, received none; run {setup_command()}"
        elif num_gpus is not None and cell.ranks > num_gpus:
            yield (
                cell.id,
                f"expected at most a rank for each of the {num_gpus} GPUs, received {cell.ranks} ranks; --device cpu "
                "trains on CPUs",
            )
        elif cell.ranks > num_cores and not oversubscribe:
            yield (
                cell.id,
                f"expected at most a rank for each of the {num_cores} cores, received {cell.ranks} ranks; "
                "--oversubscribe lets them share cores",
            )


def _reasons(framework: str) -> dict[str, str]:
    """Return why this machine cannot run strategies of a framework, as reported by the trainer's --list-strategies."""
    command = [sys.executable, "-m", f"allstep.{framework}.train", "--list-strategies"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if result.returncode:
        raise Fault(f"{shlex.join(command)} failed: {result.stderr.strip()}")
    listed = (line.partition("not available: ") for line in result.stdout.splitlines())
    return {name.strip(): reason for name, separator, reason in listed if separator}
