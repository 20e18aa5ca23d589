"""The runs of a study, and the trainer's command for each."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.commands.shared.launchers import train_command
from allstep.commands.study.description import NOT_STUDIED, RUN_SETTINGS, Description, names_of_variants
from allstep.common.api.session import words_of
from allstep.common.base.errors import UserError, quote
from allstep.common.base.flag_types import flag_name, max_local_ranks
from allstep.common.catalog.strategies import FRAMEWORKS, STRATEGIES
from allstep.common.cli.command_line import parse
from allstep.common.launch.placement import ALONE, Placement

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
    config = parse(tuple(STRATEGIES[framework]), placement, words)
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
