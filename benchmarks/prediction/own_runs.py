"""What our own measurements say: a run on one rank, links from `allstep collectives`, rates from `allstep compare`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.benchmarks.comparison import results
from allstep.benchmarks.comparison.shapes import BLOCKS, FORECAST_CELLS, MEASURED_LINK, MEASURED_TIMES, forecast_cell
from allstep.benchmarks.prediction.forecast import Machine, Workload, forecast
from allstep.benchmarks.prediction.links import Cluster, Link
from allstep.benchmarks.prediction.networks import known_networks
from allstep.benchmarks.prediction.simulation import MIB, Fusion
from allstep.benchmarks.prediction.stragglers import jitter_of, slowdown
from allstep.benchmarks.prediction.validation import Checked
from allstep.common.files import strict_json
from allstep.common.files.regular_file import read_regular
from allstep.common.files.schema import Mismatch, brief, list_of, number, record, text, whole
from allstep.common.process.errors import UserError
from allstep.common.strategies import FUSION_THRESHOLD_ON_CPU

CPU_CONTENTION = 1.0
"""Ranks on CPUs reduce with the cores that backward would use."""
STRATEGIES = {
    # Who waits for the last gradient does not wait for the cycle (tools/horovod_patches/better, awaited-cycles).
    "horovod": ("mpi4py", Fusion(FUSION_THRESHOLD_ON_CPU, 0.0)),
    "ddp": ("torch-gloo", Fusion(25 * MIB, 0.0, buckets=True)),
    "multi-worker-mirrored": ("tf-distribute", Fusion(0, 0.0)),
}
"""What gradients travel through, a backend of `allstep collectives`, and how the trainers fuse them on CPUs."""
NOTES = (
    "Own runs: a step is that of one plain process; the cores and the memory that ranks share slow it as they slow "
    "as many independent processes. Those are as fast as the slowest of them over a block of steps; ranks wait for the "
    "slowest in each step, whose deviation is estimated from that of the independent processes' blocks as if steps "
    "were independent. An all-reduce takes what allstep collectives measured on as many ranks for that many bytes, and "
    "computing stands still meanwhile. Nothing is estimated from the rows themselves.",
)

_LARGEST_LOG = 64 * 2**20
_START = record(world_size=whole(1), global_batch_size=whole(1), parameter_count=whole(1))
_EPOCH = record(images_per_second=number(1e-30))


@dataclass(frozen=True)
class MeasuredRun:
    """A training run on one rank."""

    step_seconds: float
    """The median of its epochs after the first."""
    batch_size: int
    num_parameters: int
    jitter: float | None
    """Deviation over mean of the steps of its epochs after the first; None where there is but one.

    What averages out within an epoch is not seen. What else a machine does lasts longer: with other work on it, single
    steps of the CNN deviated by 21%, the means of 30 of them still by 14%.
    """


@dataclass(frozen=True)
class MeasuredMachine(Machine):
    """A machine whose all-reduces were measured."""

    times: tuple[tuple[float, float], ...] = ()
    """Bytes and seconds, by size."""

    def all_reduce(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds, on a line between the two nearest sizes: caches make large messages dearer by the byte."""
        return interpolated(self.times, num_bytes)


def read_run(directory: Path) -> MeasuredRun:
    """A training run on one rank.

    Raises:
        UserError: there is no such run, or it had more ranks.
    """
    path = directory / "metrics.jsonl"
    try:
        lines = read_regular(path, most=_LARGEST_LOG).splitlines()
        events = [strict_json.loads(line) for line in lines]
        list_of(record(event=text))(events, "events")
        starts, epochs = ([event for event in events if event["event"] == name] for name in ("start", "epoch"))
        list_of(_START, least=1)(starts, "the start event")
        list_of(_EPOCH)(epochs, "epoch events")
    except (OSError, strict_json.NotJson, Mismatch) as error:
        raise UserError(f"expected a training run's metrics.jsonl, received {path}: {error}") from None
    world_size, batch_size, parameters = (
        starts[0][name] for name in ("world_size", "global_batch_size", "parameter_count")
    )
    rates = [epoch["images_per_second"] for epoch in epochs]
    if world_size != 1 or not rates:
        raise UserError(
            f"expected a run of one rank and of an epoch at least, received {world_size} ranks and {len(rates)} epochs "
            f"in {path}; train one by `python pytorch/train.py --output-dir DIR`"
        )
    warm = rates[1:] or rates
    jitter = jitter_of([1 / rate for rate in warm]) if len(warm) > 1 else None
    return MeasuredRun(batch_size / statistics.median(warm), batch_size, parameters, jitter)


def read_link(path: Path) -> Link:
    """The link that MPI's all-reduces of `allstep collectives` on one node amount to.

    Latency is a hop's share of the smallest message's time, bandwidth the largest message's bus bandwidth.

    Raises:
        UserError: the file is none of them, or lacks all-reduces of mpi4py.
    """
    content = results.read_input(path, "allstep-collectives", MEASURED_LINK)
    rows = _all_reduces(content, "mpi4py", path)
    num_turns = 2 * (content["ranks"] - 1)
    return Link(rows[0]["seconds"]["average"] / num_turns, rows[-1]["bus_bandwidth"])


def check_compare(directory: Path, collectives: Sequence[Path]) -> list[Checked]:
    """Forecast the cells of `allstep compare` whose strategy is in STRATEGIES, on synthetic input.

    Cells of networks that are not known, that may not be compared, or without independent processes beside them, are
    left out.

    Args:
        collectives: results of `allstep collectives`, one for each number of ranks.

    Raises:
        UserError: the directory has no whole compare result, or `collectives` lacks a number of ranks or a backend.
    """
    content = results.read_input(directory / results.SUMMARY, results.FORMAT, FORECAST_CELLS)
    links = {
        (found := results.read_input(path, "allstep-collectives", MEASURED_TIMES))["ranks"]: (found, path)
        for path in collectives
    }
    cells = [cell for cell in content["cells"] if cell["workload"] == "synthetic-weak" and cell["comparable"]]
    try:
        list_of(forecast_cell)(cells, "comparable cells")
    except Mismatch as error:
        raise UserError(f"expected what allstep compare wrote, received {directory}, in which: {error}") from None
    by_place = {_place(cell): cell for cell in cells}
    num_steps = content["settings"]["num_batches_per_iter"]
    networks, checked = known_networks(), []
    for cell in cells:
        alone, together = (by_place.get(_place(cell, "independent", ranks)) for ranks in (1, cell["ranks"]))
        num_ranks, model, batch_size = cell["ranks"], cell["model"], cell["batch_size"]
        if cell["strategy"] not in STRATEGIES or model not in networks or not (alone and together):
            continue
        if num_ranks > 1 and num_ranks not in links:
            raise UserError(
                f"expected collectives on {num_ranks} ranks for {cell['id']}, received those on "
                f"{','.join(map(str, links))}; run allstep collectives --ranks {num_ranks} and name its file, too"
            )
        backend, fusion = STRATEGIES[cell["strategy"]]
        rows = _all_reduces(links[num_ranks][0], backend, links[num_ranks][1]) if num_ranks > 1 else []
        of_blocks = _jitter_of_blocks(directory, together)
        nowhere = Link(0.0, 1.0)  # not looked at
        on = MeasuredMachine(
            Cluster(num_ranks, nowhere, nowhere),
            fusion=fusion,
            crowding=max(1.0, 1 / _of_one_process(together) / slowdown(num_ranks, of_blocks)),
            contention=CPU_CONTENTION,
            times=tuple((row["bytes"], row["seconds"]["average"]) for row in rows),
        )
        step_seconds = batch_size / alone["images_per_second"]["median"]
        workload = Workload(networks[model], batch_size, step_seconds, jitter=math.sqrt(num_steps) * of_blocks)
        predicted = forecast(workload, on, num_ranks).efficiency
        title = f"own runs, {cell['framework']}"
        checked.append(Checked(title, cell["strategy"], model, num_ranks, 1, _of_one_process(cell), predicted, ""))
    return checked


def interpolated(times: Sequence[tuple[float, float]], num_bytes: float) -> float:
    """Seconds of a message between those that were measured; beyond them, as fast by the byte as the largest.

    Args:
        times: bytes and seconds, by size.
    """
    if num_bytes <= times[0][0]:
        return times[0][1]
    for (less, before), (more, after) in itertools.pairwise(times):
        if num_bytes <= more:
            return before + (after - before) * (num_bytes - less) / (more - less)
    return times[-1][1] * num_bytes / times[-1][0]


def _all_reduces(content: dict[str, Any], backend: str, path: Path) -> list[dict[str, Any]]:
    """The rows of a library's all-reduces, by size."""
    rows = [row for row in content["rows"] if (row["collective"], row["backend"]) == ("all-reduce", backend)]
    if not rows:
        raise UserError(f"expected all-reduces of {backend} in {path}, received none; measure it with --backends")
    return sorted(rows, key=lambda row: row["bytes"])


def _place(cell: dict[str, Any], strategy: str | None = None, ranks: int | None = None) -> tuple[object, ...]:
    """What tells a cell from the others; with another strategy or number of ranks, if one is given."""
    same = (cell["framework"], cell["model"], cell["batch_size"], cell["precision"])
    return (*same, strategy or cell["strategy"], ranks or cell["ranks"])


def _jitter_of_blocks(directory: Path, cell: dict[str, Any]) -> float:
    """Deviation of the time of a block of steps within a launch, the median over launches; 0 where there is but one."""
    launches = [_blocks(directory, name) for name in cell["samples"]]
    seconds = [[1 / block["images_per_second"] for block in blocks] for blocks in launches if len(blocks) > 1]
    return statistics.median(map(jitter_of, seconds)) if seconds else 0.0


def _blocks(directory: Path, name: str) -> list[dict[str, Any]]:
    """The blocks of a sample, whose name a comparison gives: in its own directory, and nowhere else.

    Raises:
        UserError: there is none.
    """
    try:
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise Mismatch(f"expected a sample in {directory}, received {brief(name)}")
        sample = results.load(directory / name)
        BLOCKS(sample, "sample")
    except (OSError, strict_json.NotJson, Mismatch) as error:
        raise UserError(f"expected a sample of allstep compare, received {directory / name}: {error}") from None
    return sample.get("blocks") or []


def _of_one_process(cell: dict[str, Any]) -> float:
    """Efficiency against one plain process, the median of the rounds' ratios."""
    return cell["efficiency"]["single_process"]["median"]
