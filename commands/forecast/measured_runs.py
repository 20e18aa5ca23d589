"""Our own measurements: training runs, links from `allstep collectives`, speeds from `allstep compare`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allstep.commands.compare.cells import INDEPENDENT
from allstep.commands.compare.records import SUMMARY, CellResult, ComparisonResult, Sample
from allstep.commands.forecast.allreduce import Cluster, Link
from allstep.commands.forecast.forecast import Machine, Workload, forecast
from allstep.commands.forecast.networks import known_networks
from allstep.commands.forecast.simulation import Fusion, jitter_of, slowdown
from allstep.commands.forecast.site import DDP_BUCKETS
from allstep.commands.forecast.validation import Checked
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult, Row
from allstep.commands.shared.records.runs import FILE, read_events
from allstep.common.base.checkout import trainer_command
from allstep.common.base.errors import UserError
from allstep.common.cli.strategy_flags import FUSION_THRESHOLD_ON_CPU
from allstep.common.files.strict_json import Mismatch, brief

CPU_CONTENTION = 1.0
"""Contention on CPUs, where ranks reduce with the cores that backward would use."""
STRATEGIES = {
    # A rank that awaits the last gradient skips the cycle (commands/horovod/patches/better, awaited-cycles).
    "horovod": ("mpi4py", Fusion(FUSION_THRESHOLD_ON_CPU, 0.0)),
    "ddp": ("torch-gloo", DDP_BUCKETS),
    "multi-worker-mirrored": ("tf-distribute", Fusion(0, 0.0)),
}
"""Backend of `allstep collectives` that carries a strategy's gradients, and how the trainers fuse them on CPUs."""
NOTES = (
    "Own runs: a step is that of one plain process; sharing cores and memory slows it as much as it slows the same "
    "number of independent processes. Those wait for the slowest once in a block of steps, ranks in each step; the "
    "deviation of a step is estimated from that of the independent processes' blocks as if steps were independent. An "
    "all-reduce takes what allstep collectives measured on as many ranks for that many bytes, and computing stops "
    "meanwhile. Nothing is estimated from the rows themselves.",
)


@dataclass(frozen=True)
class MeasuredRun:
    """A training run."""

    step_seconds: float
    """Median step time of the epochs after the first."""
    batch_size: int
    """Samples of a rank in a step."""
    num_parameters: int
    jitter: float | None
    """Deviation over mean of the epochs' step times after the first epoch; None if there is only one.

    Deviations that average out within an epoch are not seen. Other load on a machine lasts longer: under it, single
    steps of the CNN deviated by 21%, means of 30 steps still by 14%.
    """
    noise_scale: float | None = None
    """Gradient noise scale, in samples, of the last epoch that has one; runs with --accumulate-steps measure it."""
    num_ranks: int = 1
    ranks_per_node: int | None = None
    """Ranks of a host, of a run on several hosts."""
    strategy: str = ""
    device: str | None = None


@dataclass(frozen=True)
class MeasuredMachine(Machine):
    """A machine whose all-reduces were measured."""

    times: tuple[tuple[float, float], ...] = ()
    """Pairs of bytes and seconds, by size."""

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds, interpolated between sizes because caches make large messages slower per byte."""
        return interpolated(self.times, num_bytes)


def read_run(directory: Path) -> MeasuredRun:
    """Read a training run. Raises UserError if there is no such run, or it has no speed."""
    path = directory / FILE
    try:
        events = read_events(path)
    except (OSError, Mismatch) as error:
        raise UserError(f"expected a training run's {FILE}, received {path}: {error}") from None
    if events.num_broken or not events.starts:
        raise UserError(
            f"expected a training run's {FILE}, received {path} with {len(events.starts)} start events and "
            f"{events.num_broken} broken lines; name another run"
        )
    start, rates = events.starts[0], [epoch.images_per_second for epoch in events.epochs if epoch.images_per_second]
    if not rates or not start.parameter_count or start.global_batch_size % start.world_size:
        raise UserError(
            f"expected a run of an epoch at least with the same batch on each rank, received {len(rates)} epochs with "
            f"{start.global_batch_size} samples on {start.world_size} ranks in {path}; train one by "
            f"`{trainer_command('pytorch')} --output-dir DIR`"
        )
    warm = rates[1:] or rates
    measured = [epoch.gradient_noise_scale for epoch in events.epochs if epoch.gradient_noise_scale]
    is_wide = start.local_size is not None and start.local_size < start.world_size
    return MeasuredRun(
        step_seconds=start.global_batch_size / statistics.median(warm),
        batch_size=start.global_batch_size // start.world_size,
        num_parameters=start.parameter_count,
        jitter=jitter_of([1 / rate for rate in warm]) if len(warm) > 1 and start.world_size == 1 else None,
        noise_scale=measured[-1] if measured else None,
        num_ranks=start.world_size,
        ranks_per_node=start.local_size if is_wide else None,
        strategy=start.strategy,
        device=start.device,
    )


def read_link(path: Path) -> tuple[int, Link]:
    """Return the number of ranks of a result of `allstep collectives`, and the link that MPI's all-reduces imply.

    Its latency is a hop's share of the smallest message's time, its bandwidth the largest message's bus bandwidth.
    Raises UserError if the file is no result of `allstep collectives`, or lacks all-reduces of mpi4py.
    """
    result = files.read_input(CollectivesResult, path)
    rows = _all_reduces(result, "mpi4py", path)
    num_turns = 2 * (result.ranks - 1)
    return result.ranks, Link(rows[0].seconds.average / num_turns, rows[-1].bus_bandwidth)


def check_compare(directory: Path, collectives: Sequence[Path]) -> list[Checked]:
    """Forecast the cells of `allstep compare` whose strategy is in STRATEGIES, on synthetic input.

    Cells are left out if their network is unknown, if they may not be compared, or if the result has no independent
    processes to match. `collectives` are results of `allstep collectives`, one for each number of ranks. Raises
    UserError if the directory has no complete compare result, or `collectives` lacks a number of ranks or a backend.
    """
    result = files.read_input(ComparisonResult, directory / SUMMARY)
    links = {(found := files.read_input(CollectivesResult, path)).ranks: (found, path) for path in collectives}
    cells = [cell for cell in result.cells if cell.workload == "synthetic-weak" and cell.comparable]
    by_id = {cell.id: cell for cell in cells}
    networks, checked = known_networks(), []
    for cell in cells:
        num_ranks = cell.ranks
        independent = (replace(cell, strategy=INDEPENDENT, ranks=ranks) for ranks in (1, num_ranks))
        alone, together = (by_id.get(one.id) for one in independent)
        if cell.strategy not in STRATEGIES or cell.model not in networks:
            continue
        if not (alone and alone.images_per_second and together):
            continue
        if num_ranks > 1 and num_ranks not in links:
            raise UserError(
                f"expected collectives on {num_ranks} ranks for {cell.id}, received those on "
                f"{','.join(map(str, links))}; run allstep collectives --ranks {num_ranks} and name its file, too"
            )
        backend, fusion = STRATEGIES[cell.strategy]
        rows = _all_reduces(links[num_ranks][0], backend, links[num_ranks][1]) if num_ranks > 1 else []
        block_jitter = _block_jitter(directory, together)
        nowhere = Link(0.0, 1.0, CPU_CONTENTION)  # only its contention is used
        on = MeasuredMachine(
            Cluster(num_ranks, nowhere, nowhere),
            fusion=fusion,
            crowding=max(1.0, 1 / _efficiency(together) / slowdown(num_ranks, block_jitter)),
            times=tuple((row.bytes, row.seconds.average) for row in rows),
        )
        step_seconds = cell.batch_size / alone.images_per_second.median
        step_jitter = math.sqrt(result.settings.num_batches_per_iter) * block_jitter
        workload = Workload(networks[cell.model], cell.batch_size, step_seconds, jitter=step_jitter)
        expected = forecast(workload, on, num_ranks).efficiency
        title = f"own runs, {cell.framework}"
        checked.append(Checked(title, cell.strategy, cell.model, num_ranks, 1, _efficiency(cell), expected))
    return checked


def interpolated(times: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Return the seconds of a message between measured sizes; beyond them, it takes as long per byte as the largest.

    `times` are pairs of bytes and seconds, by size.
    """
    import numpy as np

    sizes, seconds = zip(*times, strict=True)
    return float(np.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])


def _all_reduces(result: CollectivesResult, backend: str, path: Path) -> list[Row]:
    """Return the rows of a library's all-reduces, by size."""
    rows = [row for row in result.rows if (row.collective, row.backend) == ("all-reduce", backend)]
    if not rows:
        raise UserError(f"expected all-reduces of {backend} in {path}, received none; measure it with --backends")
    return sorted(rows, key=lambda row: row.bytes)


def _block_jitter(directory: Path, cell: CellResult) -> float:
    """Return the deviation of a block's time within a launch, the median over launches; 0 with single blocks."""
    launches = [_sample(directory, name).blocks for name in cell.samples]
    seconds = [[1 / block.images_per_second for block in blocks] for blocks in launches if len(blocks) > 1]
    return statistics.median(map(jitter_of, seconds)) if seconds else 0.0


def _sample(directory: Path, name: str) -> Sample:
    """Read a sample that a comparison names, if it is in the comparison's own directory.

    Raises UserError if there is no such sample.
    """
    try:
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise Mismatch(f"expected a sample in {directory}, received {brief(name)}")
        return files.read(Sample, directory / name)
    except (OSError, files.NotJson, files.OtherFormat, Mismatch) as error:
        raise UserError(f"expected a sample of allstep compare, received {directory / name}: {error}") from None


def _efficiency(cell: CellResult) -> float:
    """Return the efficiency against one plain process, the median of the rounds' ratios.

    Raises UserError if the comparison has none.
    """
    ratio = (cell.efficiency or {}).get("single_process")
    if ratio is None:
        raise UserError(f"expected the efficiency of {cell.id} against one process, received none; measure it again")
    return ratio.median
