"""From what the ranks of a launch wrote to one sample, and from the samples of a cell to its statistics."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TypeGuard

from allstep.benchmarks.comparison.cells import INDEPENDENT, Cell
from allstep.benchmarks.comparison.estimate import estimate
from allstep.benchmarks.harness.jobs import Outcome

_TRIMMED = 0.2
"""Of the pairs of blocks, the share that is left out at either end."""

Samples = Mapping[str, Sequence[dict | None]]
"""Of each cell, by its id, the sample of every round; None where it is still to come."""


def make(
    cell: Cell, number: int, outcome: Outcome, outputs: Sequence[dict], *, target: float, commands: Sequence[list[str]]
) -> dict:
    """The sample of a launch, as the file format has it.

    Args:
        number: of the round.
        outputs: what each of its processes wrote; of a launcher's job, rank 0 for all.
        target: validation accuracy the time to which is told.
    """
    started = datetime.fromtimestamp(outcome.launched_at, timezone.utc)
    sample = {
        "cell_id": cell.id,
        "round": number,
        "status": outcome.status,
        "reason": outcome.reason,
        "started": started.isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
        "command": commands[0],
        "seconds": outcome.seconds,
        "log": outcome.log,
    }
    if outcome.status != "ok":
        return sample
    blocks = [_together(of_processes) for of_processes in zip(*(output["blocks"] for output in outputs), strict=True)]
    epochs = outputs[0]["epochs"] if len(outputs) == 1 else None
    ready = [output["first_step_at"] for output in outputs]
    reached = [epoch["seconds"] for epoch in epochs or () if epoch["validation_accuracy"] >= target]
    return {
        **sample,
        "blocks": blocks,
        "images_per_second": statistics.median(block["images_per_second"] for block in blocks),
        "startup_seconds": None if None in ready else max(ready) - outcome.launched_at,
        "peak_memory_bytes_by_rank": [one for output in outputs for one in output["peak_memory_bytes_by_rank"]],
        "epochs": epochs,
        "seconds_to_target": reached[0] if reached else None,
    }


def _together(blocks: Sequence[dict]) -> dict:
    """One block of several processes at once; the slowest rank of all counts."""
    num_images = sum(block["num_images"] for block in blocks)
    seconds = [one for block in blocks for one in block["seconds_by_rank"]]
    return {"num_images": num_images, "seconds_by_rank": seconds, "images_per_second": num_images / max(seconds)}


def summarise(samples: Sequence[dict | None]) -> dict:
    """Status and statistics of a cell."""
    good = [sample for sample in samples if _is_good(sample)]
    bad = [sample for sample in samples if sample and sample["status"] != "ok"]
    accuracies = [sample["epochs"][-1]["validation_accuracy"] for sample in good if sample["epochs"]]
    memory = [sample["peak_memory_bytes_by_rank"] for sample in good]
    return {
        "status": _status(good, bad, samples),
        "reason": bad[0]["reason"] if bad else None,
        **{name: _statistics(good, name) for name in ("images_per_second", "startup_seconds", "seconds_to_target")},
        "final_accuracy": statistics.median(accuracies) if accuracies else None,
        "peak_memory_bytes_by_rank": [max(of_rank) for of_rank in zip(*memory, strict=True)] or None,
        "curve": good[0]["epochs"] if good else None,
    }


def _status(good: Sequence[dict], bad: Sequence[dict], samples: Sequence[dict | None]) -> str:
    if bad:
        return "partial" if good else "failed"
    return "pending" if None in samples else "ok"


def _statistics(samples: Sequence[dict], name: str) -> dict | None:
    values = [sample[name] for sample in samples if sample[name] is not None]
    return dataclasses.asdict(estimate(values)) if values else None


def efficiency(cell: Cell, samples: Samples, comparable: set[str]) -> dict:
    """Ratios of a cell's speed to that of others, as the file format has them.

    One ratio a round, made of the pairs of blocks with the same number, which follow each other where cells take turns.

    Args:
        comparable: ids of the cells that may be compared.
    """
    one_rank = dataclasses.replace(cell, ranks=1)
    others = {
        "same_strategy_one_rank": (one_rank, cell.ranks),
        "single_process": (dataclasses.replace(one_rank, strategy=INDEPENDENT), cell.ranks),
        "independent": (dataclasses.replace(cell, strategy=INDEPENDENT), 1),
        "first_framework": (dataclasses.replace(cell, framework=_first_framework(samples)), 1),
    }
    found = {name: ratios(cell, other, samples, comparable, factor=factor) for name, (other, factor) in others.items()}
    return {name: ratio for name, ratio in found.items() if ratio}


def ratios(cell: Cell, other: Cell, samples: Samples, comparable: set[str], *, factor: int = 1) -> dict | None:
    """Statistics of a cell's speed over `factor` times that of another, round by round; None without such rounds."""
    if not {cell.id, other.id} <= comparable:
        return None
    rounds = zip(samples[cell.id], samples[other.id], strict=True)
    ratios = [_ratio(own, others) / factor for own, others in rounds if _is_good(own) and _is_good(others)]
    return dataclasses.asdict(estimate(ratios)) if ratios else None


def share_of_limit(cell: dict) -> dict | None:
    """Statistics of a cell's speed over that of as many independent processes, the machine's limit.

    None for the limit itself, and where nothing was measured or may be compared.
    """
    return None if cell["strategy"] == INDEPENDENT else (cell["efficiency"] or {}).get("independent")


def resolution(cells: Sequence[dict]) -> str:
    """How small a difference between shares of the limit means something, in a sentence; empty where nobody can know.

    Args:
        cells: as the file format has them.
    """
    shares = filter(None, map(share_of_limit, cells))
    halves = [(share["high"] - share["mean"]) / share["mean"] for share in shares if share["num"] > 1]
    if not halves:
        return ""
    return (
        f"Shares of the limit are known to +-{statistics.median(halves):.1%} here (half the 95 % confidence interval "
        "of their mean, the median of the cells): smaller differences mean nothing. A quieter machine narrows that, "
        "and so do more --repetitions."
    )


def _first_framework(samples: Samples) -> str:
    return next(iter(samples)).split(".")[1]


def _is_good(sample: dict | None) -> TypeGuard[dict]:
    return sample is not None and sample["status"] == "ok"


def _ratio(sample: dict, reference: dict) -> float:
    """The speed of a sample over that of the reference: the geometric mean over pairs of blocks, without the extremes.

    A median alone jumps where a machine has two speeds and blocks of both are in a pair.
    """
    from scipy.stats import trim_mean

    rates = ([block["images_per_second"] for block in one["blocks"]] for one in (sample, reference))
    ratios = [math.log(one / other) for one, other in zip(*rates, strict=True)]
    return math.exp(trim_mean(ratios, _TRIMMED))
