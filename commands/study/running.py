"""Train the missing runs of a study, and save each run when it ends.

study.json is rewritten atomically after each run: however a study ends, the same command goes on with the next run.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from allstep.commands.shared.jobs import Outcome, run_jobs
from allstep.commands.shared.records import files
from allstep.commands.shared.records.runs import FILE, read_points
from allstep.commands.study.description import Description
from allstep.commands.study.records import SUMMARY, StudyResult, StudyRun
from allstep.commands.study.run_commands import LANDSCAPE, Variant
from allstep.common.base.errors import Fault, UserError
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.checkpoint.files import remove_all
from allstep.common.training.steps_in_flight import DIVERGED


def begin(
    directory: Path, name: str, description: Description, variants: Sequence[Variant], *, seeds: int, command: str
) -> StudyResult:
    """Return the study in `directory`, or a new one.

    Raises UserError if the directory holds another study, or cannot be read.
    """
    fresh = StudyResult(
        name=name,
        description=description,
        variants={one.name: tuple(map(str, one.command(0, Path(), landscape=False))) for one in variants},
        seeds=seeds,
        command=command,
        created=files.now(),
        updated=files.now(),
        num_cores=len(os.sched_getaffinity(0)),
        runs=(),
    )
    if not (directory / SUMMARY).exists():
        return fresh
    earlier = files.read_input(StudyResult, directory / SUMMARY)
    lacking = [name for name in description.measures if name not in earlier.description.measures]
    if (earlier.name, earlier.variants) != (fresh.name, fresh.variants) or lacking:
        differs = [name for name in fresh.variants if fresh.variants[name] != earlier.variants.get(name)]
        what = f"other flags of {differs[0]}" if differs else f"the measure {lacking[0]}" if lacking else "other runs"
        expected = f"the study {earlier.name} with the flags with which {directory} was begun"
        received = what if earlier.name == name else name
        raise UserError(f"expected {expected}, received {received}; give another --output-dir")
    kept = tuple(run for run in earlier.runs if run.seed < seeds)
    return dataclasses.replace(fresh, created=earlier.created, runs=kept)


def run_lacking(
    directory: Path, result: StudyResult, variants: Sequence[Variant], *, at_once: int, time_limit: float
) -> StudyResult:
    """Train every variant with every missing seed, and return the complete study.

    `at_once` is the number of runs at the same time, which share the cores. Raises UserError if the flags of a run are
    invalid; Fault if a run failed for another reason than divergence.
    """
    done = {(run.variant, run.seed) for run in result.runs}
    # Seed by seed, so that an interrupted study has runs of every variant.
    lacking = [(one, seed) for seed in range(result.seeds) for one in variants if (one.name, seed) not in done]
    places = [directory / "runs" / _folder(variant.name, seed) for variant, seed in lacking]
    landscape = result.description.landscape
    commands = [[one.command(seed, at, landscape=landscape)] for (one, seed), at in zip(lacking, places, strict=True)]
    max_ranks = max(one.num_ranks for one in variants)
    num_threads = max(1, result.num_cores // (at_once * max_ranks))
    files.write(directory / SUMMARY, result)
    total = result.seeds * len(variants)
    with ProgressBar(total, done=len(result.runs)) as progress:
        if lacking:
            progress.begin(f"{len(lacking)} of {total} trainings, {at_once} at a time")
        for number, outcome in run_jobs(commands, at_once=at_once, time_limit=time_limit, num_threads=num_threads):
            (variant, seed), placement = lacking[number], places[number]
            run = _ended(variant, seed, placement, outcome, result.description.measures)
            result = dataclasses.replace(result, updated=files.now(), runs=(*result.runs, run))
            files.write(directory / SUMMARY, result)
            for folder in (placement, *placement.glob("previous-*")):  # of runs that an earlier call did not finish
                remove_all(folder / "checkpoints")
            how = "diverged" if run.diverged else _last(run, result.description.claims[0].measure)
            count = f"{len(result.runs)} of {total}"
            progress.end(f"{count}: {variant.name}, seed {seed}: {how}, {outcome.seconds:.1f} s")
    return result


def _ended(variant: Variant, seed: int, placement: Path, outcome: Outcome, measures: Sequence[str]) -> StudyRun:
    diverged = outcome.reason is not None and DIVERGED in outcome.reason
    if outcome.status != "ok" and not diverged:
        mistake = (outcome.reason or "").removeprefix("allstep: error: ")
        if mistake != outcome.reason:
            raise UserError(f"{variant.name}, seed {seed}: {mistake}")
        raise Fault(f"{variant.name}, seed {seed}, failed: {outcome.reason}; the same command goes on with the others")
    points = read_points(placement / FILE, measures)
    if (placement / LANDSCAPE).exists():
        points += read_points(placement / LANDSCAPE, measures)
    return StudyRun(variant=variant.name, seed=seed, diverged=diverged, seconds=outcome.seconds, points=points)


def _last(run: StudyRun, measure: str) -> str:
    found = [point[measure] for point in run.points if measure in point]
    return f"{measure} {found[-1]:.4g}" if found else f"no {measure}"


def _folder(variant: str, seed: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', variant).strip('-')}-seed-{seed}"
