"""The search space of `allstep tune`: flags of the trainers, and the values to try for each, as its help shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allstep.common.base.checkout import trainer_command
from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.config.train_config import TrainConfig
from allstep.common.files import strict_yaml

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = Mapping[str, "BaseDistribution"]
Value = bool | int | float | str

_MAX_BYTES = 2**16
# Flags that the search sets itself, and flags for the files of a run.
_NOT_SEARCHED = ("output-dir", "resume", "init-from", "list-strategies")


def read_space(path: Path) -> Space:
    """Read the flags in the file, without leading hyphens, and the values that Optuna may choose for each.

    Raises UserError if the file cannot be read, names no flag, or has an invalid entry.
    """
    try:
        content = strict_yaml.load(path, maximum=_MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"expected a search space in {quote(path)}: {reason}; fix it or name another") from None
    if not isinstance(content, dict) or not content:
        raise UserError(
            f"expected lines of `flag: what to try` in {quote(path)}, received {quote(content)}; see "
            "allstep tune --help"
        )
    names = [name for name in TrainConfig().flat() if name not in _NOT_SEARCHED]
    for name in content:
        if name not in names:
            advice = did_you_mean(str(name), names, f"see {trainer_command('pytorch')} --help")
            raise UserError(f"expected flags of the trainers in {quote(path)}, received {quote(name)}; {advice}")
    config = TrainConfig()
    parts = [part for part in (config, *vars(config).values()) if dataclasses.is_dataclass(part)]
    types = {item.name.replace("_", "-"): str(item.type) for part in parts for item in dataclasses.fields(part)}
    found = {}
    for name, what in content.items():
        if "float" in types[name] and isinstance(what, dict):  # there are floats between whole numbers
            what = {key: float(value) if type(value) is int else value for key, value in what.items()}
        found[name] = distribution(what, f"{name} in {quote(path)}")
    return found


def corners(space: Space) -> list[dict[str, Value]]:
    """Return choices that together contain all ends of intervals and all names: if these are valid, all are."""
    values = {name: _ends(distribution) for name, distribution in space.items()}
    maximum = max(map(len, values.values()))
    return [{name: ends[number % len(ends)] for name, ends in values.items()} for number in range(maximum)]


def as_written(found: BaseDistribution) -> Any:
    """Return the file's entry from which `distribution` makes this one."""
    choices = getattr(found, "choices", None)
    names = ("low", "high", "log", "step")
    return (
        list(choices) if choices else {name: getattr(found, name) for name in names if getattr(found, name) is not None}
    )


def distribution(what: Any, where: str) -> BaseDistribution:
    """Return the values that Optuna may choose for a flag, from its entry in the file; `where` names the entry.

    Raises UserError if the entry is invalid.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(what, list) and what and all(isinstance(one, Value) for one in what):
        return CategoricalDistribution(what)
    keys = {"low", "high", "log", "step"}
    if not isinstance(what, dict) or not {"low", "high"} <= what.keys() <= keys:
        raise UserError(
            f"expected {where} to be a list of values, or low and high with log or step, received {quote(what)}; write "
            "it as in {low: 0.001, high: 1.0, log: true}"
        )
    numbers = [what[key] for key in ("low", "high", "step") if key in what]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        raise UserError(
            f"expected low, high and step of {where} to be numbers, received {quote(what)}; write 1.0e-4, not 1e-4, "
            "which is text in YAML"
        )
    kind = IntDistribution if all(isinstance(one, int) for one in numbers) else FloatDistribution
    try:
        return kind(**what)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"expected {where} to be an interval, received {quote(what)}: {reason}; fix it") from None


def _ends(distribution: BaseDistribution) -> list[Value]:
    choices = getattr(distribution, "choices", None)
    return list(choices) if choices else [getattr(distribution, end) for end in ("low", "high")]
