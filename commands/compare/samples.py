"""Samples of launches, and statistics of a cell's samples."""

import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone

from allstep.commands.compare.cells import INDEPENDENT, Cell
from allstep.commands.compare.records import CellResult, Sample, Summary
from allstep.commands.shared.jobs import Outcome
from allstep.commands.shared.measure import Estimate, estimate
from allstep.commands.shared.records.measured import Block, Measured

_TRIMMED = 0.2
"""Share of the pairs of blocks that is left out at either end."""

Samples = Mapping[str, Sequence[Sample | None]]
"""Samples of every round by id of the cell; None where one is still to come."""


def make(
    cell: Cell,
    number: int,
    outcome: Outcome,
    measured: Sequence[Measured],
    *,
    target: float,
    commands: Sequence[Sequence[str]],
) -> Sample:
    """Return the sample of a launch.

    Args:
        number: number of the round.
        measured: what each process wrote, if the launch succeeded.
        target: validation accuracy; the time to reach it is reported.
    """
    sample = Sample(
        cell_id=cell.id,
        round=number,
        status=outcome.status,
        reason=outcome.reason,
        started=datetime.fromtimestamp(outcome.launched_at, timezone.utc).isoformat(timespec="seconds"),
        load_average=os.getloadavg(),
        command=tuple(commands[0]),
        seconds=outcome.seconds,
        log=outcome.log,
    )
    if outcome.status != "ok":
        return sample
    blocks = tuple(map(_together, zip(*(one.blocks for one in measured), strict=True)))
    epochs = measured[0].epochs if len(measured) == 1 else None
    first_steps = [one.first_step_at for one in measured if one.first_step_at is not None]
    energies = [block.joules / block.num_images for block in blocks if block.joules is not None]
    reached = [epoch.seconds for epoch in epochs or () if epoch.validation_accuracy >= target]
    return dataclasses.replace(
        sample,
        blocks=blocks,
        images_per_second=statistics.median(block.images_per_second for block in blocks),
        startup_seconds=max(first_steps) - outcome.launched_at if len(first_steps) == len(measured) else None,
        peak_memory_bytes_by_rank=tuple(memory for one in measured for memory in one.peak_memory_bytes_by_rank),
        epochs=epochs,
        seconds_to_target=reached[0] if reached else None,
        joules_per_image=statistics.median(energies) if energies else None,
        gpu_libraries=measured[0].gpu_libraries,
    )


def _together(blocks: Sequence[Block]) -> Block:
    """Combine blocks of processes that ran at the same time into one."""
    seconds = tuple(seconds for block in blocks for seconds in block.seconds_by_rank)
    energies = [block.joules for block in blocks if block.joules is not None]
    joules = sum(energies) if len(energies) == len(blocks) else None
    return Block(sum(block.num_images for block in blocks), seconds, joules)


def summarise(samples: Sequence[Sample | None]) -> Summary:
    """Return status and statistics of a cell."""
    good = [sample for sample in samples if sample and sample.good]
    bad = [sample for sample in samples if sample and not sample.good]
    accuracies = [sample.epochs[-1].validation_accuracy for sample in good if sample.epochs]
    memory = [sample.peak_memory_bytes_by_rank for sample in good]
    return Summary(
        status=("partial" if good else "failed") if bad else "pending" if None in samples else "ok",
        reason=bad[0].reason if bad else None,
        images_per_second=_statistics(sample.images_per_second for sample in good),
        startup_seconds=_statistics(sample.startup_seconds for sample in good),
        seconds_to_target=_statistics(sample.seconds_to_target for sample in good),
        final_accuracy=statistics.median(accuracies) if accuracies else None,
        peak_memory_bytes_by_rank=tuple(map(max, zip(*memory, strict=True))) or None,
        curve=good[0].epochs if good else None,
        joules_per_image=_statistics(sample.joules_per_image for sample in good),
        gpu_libraries=good[0].gpu_libraries if good else {},
    )


def _statistics(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known else None


def efficiency(cell: Cell, samples: Samples, comparable: set[str], *, first_framework: str) -> dict[str, Estimate]:
    """Return ratios of a cell's speed to those of other cells, by name.

    Each round gives one ratio, from pairs of blocks with the same number, which are neighbours if cells take turns.
    `comparable` are the ids of the cells that may be compared.
    """
    one_rank = dataclasses.replace(cell, ranks=1)
    others = {
        "same_strategy_one_rank": (one_rank, cell.ranks),
        "single_process": (dataclasses.replace(one_rank, strategy=INDEPENDENT), cell.ranks),
        "independent": (dataclasses.replace(cell, strategy=INDEPENDENT), 1),
        "first_framework": (dataclasses.replace(cell, framework=first_framework), 1),
    }
    if cell.compiled:
        others["not_compiled"] = dataclasses.replace(cell, compiled=False), 1
    found = {name: ratios(cell, other, samples, comparable, factor=factor) for name, (other, factor) in others.items()}
    return {name: ratio for name, ratio in found.items() if ratio}


def ratios(cell: Cell, other: Cell, samples: Samples, comparable: set[str], *, factor: int = 1) -> Estimate | None:
    """Return statistics of a cell's speed over `factor` times another's, round by round; None without such rounds."""
    if not {cell.id, other.id} <= comparable:
        return None
    rounds = zip(samples[cell.id], samples[other.id], strict=True)
    found = [_ratio(one, two) / factor for one, two in rounds if one and one.good and two and two.good]
    return estimate(found) if found else None


def resolution(cells: Sequence[CellResult]) -> str:
    """Return a sentence on the smallest significant difference between shares of the limit; empty if unknown."""
    shares = [cell.share_of_limit for cell in cells if cell.share_of_limit]
    halves = [(share.high - share.mean) / share.mean for share in shares if share.num > 1]
    if not halves:
        return ""
    return (
        f"Shares of the limit are known to +-{statistics.median(halves):.1%} here (half the 95 % confidence interval "
        "of their mean, the median of the cells): smaller differences mean nothing. A quieter machine narrows that, "
        "and so do more --repetitions."
    )


def _ratio(sample: Sample, reference: Sample) -> float:
    """Return the speed of a sample over the reference's: the geometric mean over pairs of blocks, without extremes.

    A median would jump where a machine has two speeds and a pair has blocks of both.
    """
    from scipy.stats import trim_mean

    rates = ([block.images_per_second for block in one.blocks] for one in (sample, reference))
    ratios = [math.log(one / other) for one, other in zip(*rates, strict=True)]
    return math.exp(trim_mean(ratios, _TRIMMED))
