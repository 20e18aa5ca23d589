"""The section of a search by `allstep tune`: its trials, and Optuna's plots of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.commands.shared.page.document import NOTHING, Section, Table, amount
from allstep.commands.shared.page.figures import Drawing, adopted
from allstep.commands.tune.records import SearchResult

if TYPE_CHECKING:
    from optuna import Study

_MAX_ROWS = 20
_MIN_FOR_IMPORTANCES = 4
"""Minimum number of completed trials; with fewer, importances are random."""


def search(path: Path, result: SearchResult) -> Section:
    """Return the section of a result of `allstep tune`."""
    study = result.as_study()
    ended = [trial for trial in result.trials if trial.value is not None]
    section = Section(f"Search for flags: {path.name.removesuffix('.trials.json')}", commands=[result.command])
    section.text = [f"{len(result.trials)} trials, of which {len(ended)} trained to their end."]
    if not ended:
        return section
    best = study.best_trial
    flags = " ".join(f"--{name} {value}" for name, value in best.params.items())
    section.text.append(f"Best validation {result.metric}: {amount(best.value)}, with {flags}.")
    section.figures = _figures(study, result)
    first = sorted(ended, key=lambda trial: trial.value or 0.0, reverse=result.metric == "accuracy")[:_MAX_ROWS]
    rows = [[amount(one.value), *(str(one.params.get(name, NOTHING)) for name in result.space)] for one in first]
    section.tables = [Table(f"The best {len(rows)} trials", [f"validation {result.metric}", *result.space], rows)]
    return section


def _figures(study: Study, result: SearchResult) -> list[Drawing]:
    import matplotlib as mpl

    mpl.use("agg")  # Optuna's plots ask their canvas how wide a text is
    from optuna.exceptions import ExperimentalWarning
    from optuna.visualization import matplotlib as plots

    warnings.simplefilter("ignore", ExperimentalWarning)
    target = f"validation {result.metric}"
    drawings = [adopted("Optimization history", lambda: plots.plot_optimization_history(study, target_name=target))]
    values = {trial.value for trial in result.trials if trial.value is not None}
    num_ended = sum(trial.value is not None for trial in result.trials)
    if num_ended >= _MIN_FOR_IMPORTANCES and len(values) > 1:
        drawings.append(adopted("Parameter importances", lambda: plots.plot_param_importances(study)))
    drawings.append(adopted("Slices", lambda: plots.plot_slice(study, target_name=target)))
    return drawings
