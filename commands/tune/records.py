"""Results of `allstep tune` for reports, next to its study: every trial that has ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from allstep.common.base.errors import UserError, summary
from allstep.common.files.schema import Mismatch, number

if TYPE_CHECKING:
    from optuna import Study


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial that has ended."""

    params: dict[str, Any]
    """Flags of the trial."""
    value: float | None
    """Metric at the end of the trial; None if it was pruned or diverged."""
    epochs: dict[str, float]
    """Metric after each epoch, by the number of the epoch."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Contents of STUDY.trials.json."""

    FORMAT: ClassVar[str] = "allstep-search"
    VERSION: ClassVar[int] = 1

    metric: Literal["accuracy", "loss"]
    command: str
    space: dict[str, Any]
    """Values to try for each flag, as in the file of the search space."""
    trials: tuple[TrialResult, ...]

    def __post_init__(self) -> None:
        self.as_study()

    def as_study(self) -> Study:
        """Return the search as an Optuna study in memory. Raises Mismatch if a trial is outside the space."""
        import optuna

        from allstep.commands.tune.space import distribution

        optuna.logging.set_verbosity(logging.ERROR)
        study = optuna.create_study(direction="maximize" if self.metric == "accuracy" else "minimize")
        try:
            for what in self.space.values():
                for limit in what.values() if isinstance(what, dict) else ():
                    number()(float(limit), "the space")
            space = {name: distribution(what, name) for name, what in self.space.items()}
            for trial in self.trials:
                state = optuna.trial.TrialState.PRUNED if trial.value is None else optuna.trial.TrialState.COMPLETE
                tried = {name: space[name] for name in trial.params}
                study.add_trial(
                    optuna.trial.create_trial(state=state, value=trial.value, params=trial.params, distributions=tried)
                )
        except (UserError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise Mismatch(f"expected trials within the space, received others: {summary(error)}") from None
        return study
