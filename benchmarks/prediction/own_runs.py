"""What our own measurements say: a run on one rank, links from `allstep collectives`, rates from `allstep compare`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from allstep.benchmarks.prediction.forecast import Machine, Workload, forecast
from allstep.benchmarks.prediction.links import Cluster, Link
from allstep.benchmarks.prediction.networks import known_networks
from allstep.benchmarks.prediction.simulation import MIB, Fusion
from allstep.benchmarks.prediction.stragglers import jitter_of
from allstep.benchmarks.prediction.validation import Checked
from allstep.common.errors import UserError

CPU_CONTENTION = 1.0
"""Ranks on CPUs reduce with the cores that backward would use."""
STRATEGIES = {
    "horovod": ("mpi4py", Fusion()),
    "ddp": ("torch-gloo", Fusion(25 * MIB, 0.0, buckets=True)),
    "multi-worker-mirrored": ("tf-distribute", Fusion(0, 0.0)),
}
"""What gradients travel through, a backend of `allstep collectives`, and how they are fused by default."""


def read_run(directory: Path) -> tuple[float, int, int]:
    """Step seconds, batch size and parameters of a training run on one rank; the median of its epochs after the first.

    Raises:
        UserError: there is no such run, or it had more ranks.
    """
    path = directory / "metrics.jsonl"
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        start = next(event for event in events if event["event"] == "start")
        rates = [event["images_per_second"] for event in events if event["event"] == "epoch"]
        world_size, batch_size, parameters = (
            int(start[name]) for name in ("world_size", "global_batch_size", "parameter_count")
        )
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"expected a training run's metrics.jsonl, received {path}: {type(error).__name__} {error}"
        ) from None
    if world_size != 1 or not rates:
        raise UserError(
            f"expected a run of one rank and of an epoch at least, received {world_size} ranks and {len(rates)} epochs "
            f"in {path}; train one by `python pytorch/train.py --output-dir DIR`"
        )
    return batch_size / statistics.median(rates[1:] or rates), batch_size, parameters


def read_link(path: Path, backend: str = "mpi4py") -> Link:
    """The link that all-reduces of `allstep collectives` on one node amount to.

    Latency is a hop's share of the smallest message's time, bandwidth the largest message's bus bandwidth.

    Raises:
        UserError: the file is none of them, or lacks all-reduces of the backend.
    """
    content = read_json(path, "allstep-collectives")
    rows = [row for row in content["rows"] if (row["collective"], row["backend"]) == ("all-reduce", backend)]
    if not rows:
        raise UserError(f"expected all-reduces of {backend} in {path}, received none; measure it with --backends")
    smallest, largest = (choose(rows, key=lambda row: row["bytes"]) for choose in (min, max))
    num_turns = 2 * (content["ranks"] - 1)
    return Link(smallest["seconds"]["average"] / num_turns, largest["bus_bandwidth"])


def check_compare(directory: Path, collectives: Path) -> list[Checked]:
    """Forecast the cells of `allstep compare` whose strategy is in STRATEGIES, on synthetic input.

    A cell's step is that of one independent process; the node is as crowded as its independent processes are. Cells of
    networks that are not known, and without independent processes beside them, are left out.

    Raises:
        UserError: the directory has no compare result, or `collectives` lacks a strategy's backend.
    """
    content = read_json(directory / "compare.json", "allstep-compare")
    cells = [cell for cell in content["cells"] if cell["workload"] == "synthetic-weak" and cell["images_per_second"]]
    by_place = {(c["framework"], c["model"], c["batch_size"], c["strategy"], c["ranks"]): c for c in cells}
    networks, found = known_networks(), []
    for (framework, model, batch_size, strategy, num_ranks), cell in by_place.items():
        alone, together = (by_place.get((framework, model, batch_size, "independent", num)) for num in (1, num_ranks))
        if strategy not in STRATEGIES or num_ranks == 1 or model not in networks or not (alone and together):
            continue
        rate = alone["images_per_second"]["median"]
        workload = Workload(networks[model], batch_size, batch_size / rate, jitter=_jitter(directory, alone))
        crowding = num_ranks * rate / together["images_per_second"]["median"]
        backend, fusion = STRATEGIES[strategy]
        link = read_link(collectives, backend)
        on = Machine(
            Cluster(num_ranks, link, link), fusion=fusion, crowding=max(1.0, crowding), contention=CPU_CONTENTION
        )
        predicted = forecast(workload, on, num_ranks).efficiency
        measured = cell["images_per_second"]["median"] / (num_ranks * rate)
        title, system = f"own runs, {framework}", strategy
        found.append(Checked(title, system, model, num_ranks, 1, measured, predicted, ""))
    return found


def read_json(path: Path, expected: str, version: int = 1) -> dict[str, Any]:
    """A result file of allstep's.

    Raises:
        UserError: it is missing, half-written, of another kind or of another version.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"expected a readable {expected} file, received {path}: {error}") from None
    received = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
    if received != (expected, version):
        raise UserError(
            f"expected format {expected}, version {version}, received {received[0]}, version {received[1]} in {path}; "
            "measure anew, or read it with the allstep that wrote it"
        )
    return content


def _jitter(directory: Path, cell: dict[str, Any]) -> float:
    """Of the blocks of the cell's samples, each relative to its own launch."""
    ratios: list[float] = []
    for name in cell["samples"]:
        sample = json.loads((directory / name).read_text())
        blocks = [block["images_per_second"] for block in sample.get("blocks") or []]
        if len(blocks) > 1:
            middle = statistics.fmean(blocks)
            ratios += [rate / middle for rate in blocks]
    return jitter_of(ratios) if len(ratios) > 1 else 0.0
