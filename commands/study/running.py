"""The runs of a study: the trainer's command for each; train the missing ones, and save each when it ends.

study.json is rewritten atomically after each run: however a study ends, the same command goes on with the next run.
"""

import dataclasses
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.commands.shared.jobs import Outcome, run_jobs, train_command
from allstep.commands.shared.records import files
from allstep.commands.shared.records.runs import FILE, read_points
from allstep.commands.study.description import (
    NOT_STUDIED,
    RUN_SETTINGS,
    SUMMARY,
    Description,
    StudyResult,
    StudyRun,
    names_of_variants,
)
from allstep.common.api.session import words_of
from allstep.common.base.errors import Fault, UserError, quote
from allstep.common.base.flag_types import flag_name, max_local_ranks
from allstep.common.base.progress_bar import ProgressBar
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES
from allstep.common.checkpoint.directories import remove_all
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE, Placement
from allstep.common.training.steps_in_flight import DIVERGED

LANDSCAPE = "landscape.jsonl"


@dataclass(frozen=True)
class Variant:
    """One series of a study at one value of x."""

    name: str
    framework: str
    strategy: str
    num_ranks: int
    slow_rank: int | None
    words: tuple[str, ...]
    """Arguments of the trainer."""

    def command(self, seed: int, directory: Path, *, landscape: bool) -> list[str]:
        """Return the command that trains with a seed; `landscape` appends measuring the loss around the weights."""
        words = (*self.words, "--seed", seed, "--output-dir", directory)
        module = None
        if self.slow_rank is not None:
            module = "allstep.commands.study.slowed"
            words = ("--framework", self.framework, "--slow-rank", self.slow_rank, *words)
        command = train_command(self.framework, self.strategy, self.num_ranks, words, module=module)
        if not landscape:
            return command
        program = ("python", "-m", "allstep.commands.study.landscape", "--framework", self.framework)
        files = ("--config", directory / "config.yaml", "--init-from", "latest", "--output", directory / LANDSCAPE)
        return ["bash", "-c", f"{shlex.join(command)} && {shlex.join(map(str, (*program, *files)))}"]


def variants(description: Description, framework: str | None, trainer_flags: Sequence[str]) -> list[Variant]:
    """Return all variants of a study, checked before the first run.

    `framework` replaces the study's unless it is None; `trainer_flags` are words that override the study's base flags.
    Raises UserError if the flags of a run are invalid, or a flag may only be set by the study.
    """
    _check_given(description, framework, trainer_flags)
    found = []
    for name, (series, x) in names_of_variants(description).items():
        own = {**description.series[series], **({description.x.flag: x} if description.x else {})}
        settings = {**description.flags, **({"framework": framework} if framework else {}), **own}
        base, last = (
            {flag: value for flag, value in flags.items() if flag not in RUN_SETTINGS}
            for flags in (description.flags, own)
        )
        words = (*words_of(base), *trainer_flags, *words_of(last))
        found.append(_variant(name, settings, words))
    return found


def _variant(name: str, settings: Mapping[str, Any], words: tuple[str, ...]) -> Variant:
    framework, num_ranks = settings.get("framework", FRAMEWORKS[0]), settings.get("ranks", 1)
    slow_rank = settings.get("slow-rank")
    if framework not in FRAMEWORKS:
        raise UserError(f"expected framework to be {' or '.join(FRAMEWORKS)} in {name}, received {framework}; fix it")
    _check_number("ranks", num_ranks, 1, max_local_ranks(), name)
    if slow_rank is not None:
        _check_number("slow-rank", slow_rank, 0, num_ranks - 1, name)
    hosts = (socket.gethostname(),)
    placement = Placement("horovodrun", 0, num_ranks, 0, num_ranks, 0, hosts) if num_ranks > 1 else ALONE
    try:
        config = parse(tuple(STRATEGIES[framework]), placement, words)
    except UserError as mistake:
        raise UserError(f"{name}, with the study's flags and yours: {mistake}") from None
    if not STRATEGIES[framework][config.strategy_name].can_have(num_ranks):
        raise UserError(
            f"expected a number of ranks that --strategy {config.strategy_name} can have in {name}, received "
            f"{num_ranks}; change one of them"
        )
    return Variant(name, framework, config.strategy_name, num_ranks, slow_rank, words)


def _check_number(what: str, value: Any, minimum: int, maximum: int, name: str) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        expected = f"expected {what} to be a whole number from {minimum} to {maximum} in {name}"
        raise UserError(f"{expected}, received {quote(value)}; fix it")


def _check_given(description: Description, framework: str | None, trainer_flags: Sequence[str]) -> None:
    """Refuse flags on the command line that differ between the runs of the study."""
    varied = {flag for flags in description.series.values() for flag in flags}
    varied |= {description.x.flag} if description.x else set()
    named = [*map(flag_name, trainer_flags), *(["framework"] if framework else [])]
    for flag in named:
        if flag in varied or flag in NOT_STUDIED:
            raise UserError(
                f"expected flags that are the same in all runs, received --{flag}, which this study gives; leave it "
                "out, or change it in a copy of the study's file"
            )


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
    folders = [directory / "runs" / _folder(variant.name, seed) for variant, seed in lacking]
    landscape = result.description.landscape
    commands = [[one.command(seed, at, landscape=landscape)] for (one, seed), at in zip(lacking, folders, strict=True)]
    max_ranks = max(one.num_ranks for one in variants)
    num_threads = max(1, result.num_cores // (at_once * max_ranks))
    files.write(directory / SUMMARY, result)
    for variant, seed in done:
        _remove_checkpoints(directory / "runs" / _folder(variant, seed))  # where a kill interrupted it
    total = result.seeds * len(variants)
    with ProgressBar(total, done=len(result.runs)) as progress:
        if lacking:
            progress.begin(f"{len(lacking)} of {total} trainings, {at_once} at a time")
        for number, outcome in run_jobs(commands, at_once=at_once, time_limit=time_limit, num_threads=num_threads):
            (variant, seed), folder = lacking[number], folders[number]
            run = _ended(variant, seed, folder, outcome, result.description.measures)
            result = dataclasses.replace(result, updated=files.now(), runs=(*result.runs, run))
            files.write(directory / SUMMARY, result)
            _remove_checkpoints(folder)
            how = "diverged" if run.diverged else _last(run, result.description.claims[0].measure)
            count = f"{len(result.runs)} of {total}"
            progress.end(f"{count}: {variant.name}, seed {seed}: {how}, {outcome.seconds:.1f} s")
    return result


def _remove_checkpoints(folder: Path) -> None:
    for run in (folder, *folder.glob("previous-*")):  # of runs that an earlier call did not finish
        remove_all(run / "checkpoints")


def _ended(variant: Variant, seed: int, folder: Path, outcome: Outcome, measures: Sequence[str]) -> StudyRun:
    diverged = outcome.reason is not None and DIVERGED in outcome.reason
    if outcome.status != "ok" and not diverged:
        mistake = (outcome.reason or "").removeprefix("allstep: error: ")
        if mistake != outcome.reason:
            raise UserError(f"{variant.name}, seed {seed}: {mistake}")
        raise Fault(f"{variant.name}, seed {seed}, failed: {outcome.reason}; the same command goes on with the others")
    points = read_points(folder / FILE, measures)
    if (folder / LANDSCAPE).exists():
        points += read_points(folder / LANDSCAPE, measures)
    return StudyRun(variant=variant.name, seed=seed, diverged=diverged, seconds=outcome.seconds, points=points)


def _last(run: StudyRun, measure: str) -> str:
    found = [point[measure] for point in run.points if measure in point]
    return f"{measure} {found[-1]:.4g}" if found else f"no {measure}"


def _folder(variant: str, seed: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', variant).strip('-')}-seed-{seed}"
