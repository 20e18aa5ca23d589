"""The study of a search: one file that several searches may work on at the same time, and that survives their deaths.

A process that works on a trial holds a lock on a file next to the study. The kernel releases the lock when the process
ends, in whatever way. So a trial that Optuna lists as running, but whose lock is free, was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from allstep.commands.shared.records import files
from allstep.commands.tune.space import Space, as_written, distribution
from allstep.common.base.errors import UserError, quote, summary
from allstep.common.files.strict_json import Mismatch, number

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASES = (".db", ".sqlite", ".sqlite3")
"""Suffixes of SQLite files; files with other names are journals, which also work on network file systems."""
DIRECTIONS: dict[str, Literal["minimize", "maximize"]] = {"accuracy": "maximize", "loss": "minimize"}
_NAME = "allstep"
_METRIC = "metric"


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

        optuna.logging.set_verbosity(logging.ERROR)
        study = optuna.create_study(direction=DIRECTIONS[self.metric])
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


def open_study(path: Path, *, metric: str) -> Study:
    """Open the study in the file, or create it.

    Raises UserError if the file is no study, or the study has another metric.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)  # replace its line per trial by ours, which has the flags as typed
    try:
        with _locked(_asking(path)):  # a new database has its tables made once
            study = optuna.create_study(
                storage=_storage(path), study_name=_NAME, load_if_exists=True, direction=DIRECTIONS[metric]
            )
    except Exception as error:  # Optuna, SQLAlchemy and SQLite raise different errors for other files
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"expected a study of allstep tune in {quote(path)}: {reason}; name another file") from None
    about = study.user_attrs.get(_METRIC, metric)
    if about != metric:
        raise UserError(
            f"expected --metric {about}, which the study in {quote(path)} is about, received {metric}; give that, or "
            "another file"
        )
    study.set_user_attr(_METRIC, metric)
    return study


def trial_of(path: Path, number: int) -> Trial:
    """Return the trial of that number, to report to it from another process than the one that asked for it.

    A trial is pruned if after some epoch it is worse than the median of the others after the same epoch.
    """
    import optuna

    study = optuna.load_study(study_name=_NAME, storage=_storage(path), pruner=optuna.pruners.MedianPruner())
    return optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)


@contextmanager
def next_trial(
    study: Study, path: Path, space: Space, num_trials: int, *, seed: int
) -> Iterator[tuple[Trial | None, int]]:
    """Yield a trial to work on while the block runs; None if the study has `num_trials`, or others work on the rest.

    Also yields how many trials of killed searches will be tried again. Each trial draws from a random stream that
    depends on the seed and its number, so that searches at the same time, and resumed ones, draw different trials.
    """
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    with contextlib.ExitStack() as locks:
        with _locked(_asking(path)):
            num_killed = _recover(study, path)
            trials = study.get_trials(deepcopy=False)
            taken = [trial for trial in trials if trial.state not in (TrialState.FAIL, TrialState.WAITING)]
            stream = np.random.SeedSequence((seed, len(trials)))
            study.sampler = TPESampler(seed=int(stream.generate_state(1)[0]))
            trial = study.ask(dict(space)) if len(taken) < num_trials else None
            if trial:
                locks.enter_context(_locked(_lock_of(path, trial.number)))
        yield trial, num_killed
        if trial:
            _lock_of(path, trial.number).unlink(missing_ok=True)


def keep_trials(study: Study, path: Path, *, metric: Literal["accuracy", "loss"], command: str) -> None:
    """Write all completed and pruned trials next to the study, for the figures of `allstep report`."""
    from optuna.trial import TrialState

    with _locked(_asking(path)):
        found = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        space = {name: as_written(one) for trial in found for name, one in trial.distributions.items()}
        trials = tuple(
            TrialResult(
                params=trial.params,
                value=trial.value if trial.state == TrialState.COMPLETE else None,
                epochs={str(epoch): value for epoch, value in trial.intermediate_values.items()},
            )
            for trial in found
        )
        result = SearchResult(metric=metric, command=command, space=space, trials=trials)
        files.write(path.with_name(f"{path.stem}.trials.json"), result)


def _recover(study: Study, path: Path) -> int:
    """Queue the trials of killed searches again; return how many."""
    from optuna.trial import TrialState

    num_killed = 0
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        with contextlib.suppress(BlockingIOError), _locked(_lock_of(path, trial.number), wait=False):
            _lock_of(path, trial.number).unlink(missing_ok=True)  # which a search that ends removes itself
            # Its search may have ended it just before it let go of the lock.
            if study.get_trials(deepcopy=False)[trial.number].state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
                study.enqueue_trial(trial.params)
                num_killed += 1
    return num_killed


def _asking(path: Path) -> Path:
    return path.with_name(f"{path.name}.asking")


def _lock_of(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.trial-{number}.lock")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a file. Raises BlockingIOError if another process holds the lock, and `wait` is false."""
    with open(path, "a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _storage(path: Path):
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if path.suffix in DATABASES:
        return f"sqlite:///{path.absolute()}"
    return JournalStorage(JournalFileBackend(str(path)))
