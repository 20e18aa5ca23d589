"""The description of a study: a short YAML file that defines what is trained, what is measured and what is expected.

docs/studies.md explains one. Every series is trained at every x with every seed; study.json has the results.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from allstep.common.base.errors import UserError, did_you_mean, quote
from allstep.common.config.train_config import TrainConfig
from allstep.common.files import strict_yaml
from allstep.common.files.disk import texts
from allstep.common.files.strict_json import (
    LARGEST,
    Count,
    Mismatch,
    NonNegative,
    Positive,
    anything,
    brief,
    from_json,
    list_of,
    matching,
    whole,
)

_TEXTS = texts(Path(__file__).parent / "studies")
STUDIES = tuple(name.removesuffix(".yaml") for name in _TEXTS)
"""Names of the studies that come with allstep."""
RUN_SETTINGS = ("framework", "ranks", "slow-rank")
"""Settings allowed among the flags of a study that are not flags of the trainers."""
NOT_STUDIED = ("seed", "output-dir", "resume", "init-from", "list-strategies")
"""Flags that a study sets itself."""

MAX_SEEDS = 1000

_MAX_BYTES = 2**16
_SOME = list_of(anything, minimum=1)
_OneLine = Annotated[str, matching(r"[^\n]*\S[^\n]*\n?", "a text of one line")]


@dataclass(frozen=True)
class Axis:
    """The flag that is varied within each series."""

    CLOSED: ClassVar[bool] = True
    label: _OneLine
    flag: str
    """A flag of the trainers, or one of RUN_SETTINGS."""
    values: Annotated[tuple[Any, ...], _SOME]
    """Numbers or words."""

    def __post_init__(self) -> None:
        for value in self.values:
            if type(value) not in (int, float, str) or (type(value) is not str and abs(value) > LARGEST):
                raise Mismatch(f"expected the values of x to be numbers or words, received {brief(value)}")


@dataclass(frozen=True)
class FigureWanted:
    """A figure with a curve for each series; with another x than the study's, for each series at each of its x."""

    CLOSED: ClassVar[bool] = True
    y: str
    """Name of a measure."""
    x: str | None = None
    """Measure that is read together with y, such as epoch; None for the study's x."""
    label: str | None = None
    """Label of the y axis; None for the measure's name."""
    x_scale: Literal["linear", "log2", "log10"] = "linear"
    y_scale: Literal["linear", "log2", "log10"] = "linear"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A part of the expectation that can be checked: one of four relations between means over the seeds."""

    CLOSED: ClassVar[bool] = True
    says: _OneLine
    measure: str
    of: Annotated[tuple[str, ...], _SOME]
    """Variants; it suffices if the claim is true of one of them."""
    against: str
    """Variant that they are compared with."""
    within: NonNegative | None = None
    """Maximum by which it is worse."""
    worse_by: NonNegative | None = None
    """Minimum by which it is worse."""
    better_by: NonNegative | None = None
    """Minimum by which it is better."""
    times: Positive | None = None
    """Minimum of its ratio to the other variant."""

    def __post_init__(self) -> None:
        given = [name for name in RELATIONS if getattr(self, name) is not None]
        if len(given) != 1:
            raise Mismatch(f"expected the claim to have one of {', '.join(RELATIONS)}, received {len(given)}")

    @property
    def relation(self) -> str:
        return next(name for name in RELATIONS if getattr(self, name) is not None)

    @property
    def bound(self) -> float:
        return getattr(self, self.relation)


RELATIONS = ("within", "worse_by", "better_by", "times")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Contents of a study's file."""

    CLOSED: ClassVar[bool] = True
    title: _OneLine
    question: _OneLine
    expectation: _OneLine
    source: _OneLine
    """Source of the expectation."""
    flags: dict[str, Any]
    """Flags of every run."""
    x: Axis | None = None
    series: dict[str, dict[str, Any]]
    """Flags of each series, by name."""
    figures: tuple[FigureWanted, ...]
    claims: Annotated[tuple[Claim, ...], _SOME]
    seeds: Annotated[int, whole(1, MAX_SEEDS)] = 5
    alone: bool = False
    """Whether a run needs the machine to itself because its speed is measured."""
    landscape: bool = False
    """Whether the loss around the weights is measured after each training (`landscape.py`)."""
    diverged_counts_as: dict[str, float] = dataclasses.field(default_factory=dict)
    """Value of each measure for runs whose loss became infinite; without one, such runs are left out."""
    remark: str | None = None
    """Note on the study on embedded data."""

    def __post_init__(self) -> None:
        if not self.series:
            raise Mismatch("expected the study.series to name one or more, received none")

    @property
    def measures(self) -> tuple[str, ...]:
        """Fields of metrics.jsonl that the study uses, each once."""
        names = [figure.y for figure in self.figures] + [figure.x for figure in self.figures]
        return tuple(dict.fromkeys(name for name in (*names, *(claim.measure for claim in self.claims)) if name))


def read_description(name: str) -> tuple[str, Description]:
    """Read a study by its name, or by the path of its file; return its name and description.

    Raises UserError if there is no such study, or the file does not describe one.
    """
    is_path = name.endswith((".yaml", ".yml"))
    if not is_path and name not in STUDIES:
        advice = did_you_mean(name, STUDIES, "or name a YAML file")
        raise UserError(f"expected one of the studies {', '.join(STUDIES)}, received {quote(name)}; {advice}")
    path = Path(name)
    try:
        content = strict_yaml.load(path, maximum=_MAX_BYTES) if is_path else strict_yaml.parse(_TEXTS[f"{name}.yaml"])
        _check_text_keys(content)
        description = from_json(Description, content, "the study")
        _check_flags(description)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"expected a description of a study, received {quote(path)}: {reason}; fix it or name another"
        ) from None
    return path.stem if is_path else name, description


def _check_text_keys(value: Any) -> None:
    """Refuse keys that YAML reads as numbers or booleans, such as `no`. Raises Mismatch for the first one."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise Mismatch(f"expected keys that are text, received {brief(key)}; quote it")
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_text_keys(item)


def _check_flags(description: Description) -> None:
    """Refuse flags that the trainers do not have, and variants that the study does not have.

    Raises Mismatch for the first of them.
    """
    known = [name for name in (*TrainConfig().flat(), *RUN_SETTINGS) if name not in NOT_STUDIED]
    axis = description.x
    given = [("x", [axis.flag] if axis else []), ("flags", description.flags), *description.series.items()]
    for where, names in given:
        for name in names:
            if name not in known:
                raise _unknown(f"flags of the trainers in {where}", name, known)
    variants = names_of_variants(description)
    for claim in description.claims:
        for name in (*claim.of, claim.against):
            if name not in variants:
                raise _unknown("variants of the study (SERIES, X) in claims", name, variants)


def _unknown(expected: str, name: str, known: Iterable[str]) -> Mismatch:
    advice = did_you_mean(name, known)
    return Mismatch(f"expected {expected}, received {quote(name)}" + (f" ({advice})" if advice else ""))


def names_of_variants(description: Description) -> dict[str, tuple[str, Any]]:
    """Return series and x of each variant by its name, series after series."""
    if description.x is None:
        return {series: (series, None) for series in description.series}
    return {f"{series}, {x}": (series, x) for series in description.series for x in description.x.values}


SUMMARY = "study.json"


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A run of a study that has ended."""

    variant: str
    seed: int
    diverged: bool
    """Whether the loss became infinite."""
    seconds: NonNegative
    """Seconds from launch to end."""
    points: tuple[dict[str, float], ...]
    """The study's measures in each event of metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """Contents of study.json."""

    FORMAT: ClassVar[str] = "allstep-study"
    VERSION: ClassVar[int] = 1

    name: str
    description: Description
    variants: dict[str, tuple[str, ...]]
    """Words of the command that trains each variant with seed 0, by name."""
    seeds: Count
    command: str
    created: str
    updated: str
    num_cores: Count
    runs: tuple[StudyRun, ...]

    def __post_init__(self) -> None:
        for run in self.runs:
            if run.variant not in self.variants:
                raise Mismatch(f"expected runs of the study's variants, received one of {run.variant!r}")

    @property
    def finished(self) -> bool:
        """Whether every variant was trained with every seed."""
        return len(self.runs) == len(self.variants) * self.seeds
