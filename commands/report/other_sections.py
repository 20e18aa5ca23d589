"""The sections of benchmarks, searches, training runs and their profiles."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from allstep.commands.report.sources import RecordedRun
from allstep.commands.shared.jobs import LAUNCHERS, start
from allstep.commands.shared.page.document import NOTHING, Section, Table, amount, mebibytes, share
from allstep.commands.shared.page.figures import Drawing, Line, adopted, bars, confusion, lines
from allstep.commands.shared.records.measured import BenchmarkResult
from allstep.commands.shared.records.runs import Epoch, ProfileResult
from allstep.commands.tune.study import SearchResult
from allstep.common.base.checkout import trainer

if TYPE_CHECKING:
    from optuna import Study

_MAX_CLASSES = 50
"""Classes that a figure can show."""


def benchmark(path: Path, result: BenchmarkResult) -> Section:
    """Return the section of a benchmark that `benchmarks.figures.save` wrote."""
    rows = [
        [one.what, *map(amount, (one.ours, one.reference, one.ratio)), one.target, one.verdict]
        for one in result.figures
    ]
    table = Table("", ["", "ours", "reference", "ratio", "target", "reached"], rows)
    name = path.stem.replace("_", " ").capitalize()
    text = [f"Measured {result.time}."] if result.time else []
    return Section(f"{name}: ours and a reference", text=text, tables=[table])


def runs(found: Sequence[tuple[Path, RecordedRun]]) -> Section:
    """Return the section of training runs, with their curves in one frame."""
    section = Section("Training runs")
    losses, accuracies, memory, rows = [], [], [], []
    for path, run in found:
        start = run.start
        label = f"{path.name}: {start.framework} {start.strategy}, {start.world_size} ranks"
        if run.epochs:
            numbers, epoch_losses = [epoch.epoch for epoch in run.epochs], [epoch.train_loss for epoch in run.epochs]
            losses.append(Line(label, numbers, epoch_losses))
        known = [(epoch.cumulative_seconds, epoch.validation_accuracy) for epoch in run.epochs]
        if measured := [(seconds, accuracy) for seconds, accuracy in known if accuracy is not None]:
            seconds, shares = zip(*measured, strict=True)
            accuracies.append(Line(label, seconds, shares))
        if run.end and run.end.peak_memory_bytes:
            memory.append((path.name, run.end.peak_memory_bytes / 2**20))
        last = run.epochs[-1] if run.epochs else None
        rows.append(
            [
                path.name,
                f"{start.framework} {start.strategy}",
                str(start.world_size),
                str(start.global_batch_size),
                str(len(run.epochs)),
                amount(last and last.train_loss),
                share(last and last.validation_accuracy),
                amount(last and last.cumulative_seconds),
                amount(last and last.images_per_second),
                mebibytes(run.end.peak_memory_bytes) if run.end else "did not end",
            ]
        )
        if run.config:
            section.commands.append(_command(run.config, run))
        if last:
            section.figures += _of_classes(path.name, last, run.start.classes)
    if losses:
        section.figures.append(lines("Training loss", losses, x_label="epoch", y_label="loss"))
    if accuracies:
        caption = "Validation accuracy against training time"
        section.figures.append(lines(caption, accuracies, x_label="seconds", y_label="accuracy"))
    if memory:
        section.figures.append(bars("Peak memory of rank 0", *zip(*memory, strict=True), x_label="MiB"))
    header = ["run", "", "ranks", "global batch", "epochs", "loss", "accuracy", "seconds", "images/s", "MiB"]
    section.tables.append(Table("The last epoch of each run", header, rows))
    return section


def _of_classes(run: str, epoch: Epoch, classes: Sequence[str]) -> list[Drawing]:
    """Return the figures of a run's last epoch that show each class, as far as --metrics has measured them."""
    figures, counts = [], epoch.validation_confusion_matrix
    if counts and len(counts) <= _MAX_CLASSES and all(len(row) == len(counts) for row in counts):
        names = classes if len(classes) == len(counts) else list(map(str, range(len(counts))))
        figures.append(confusion(f"Confusion matrix of {run}", counts, names))
    for name in ("precision", "recall", "f1"):
        values = getattr(epoch, f"validation_{name}_per_class")
        if values and len(values) <= _MAX_CLASSES:
            names = classes if len(classes) == len(values) else list(map(str, range(len(values))))
            figures.append(bars(f"{name.capitalize()} of each class of {run}", names, values, x_label=name))
    return figures


def _command(config: Path, run: RecordedRun) -> str:
    """Return the command that trains as the run did, on as many ranks with the same launcher."""
    launcher = "mpiexec" if run.start.launcher == "PMI" else run.start.launcher
    # Without a launcher, a run starts its ranks itself.
    program = start(launcher if launcher in LAUNCHERS else None, run.start.world_size)
    return shlex.join([*program, *trainer(run.start.framework), "--config", str(config)])


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


def profile(path: Path, result: ProfileResult) -> Section:
    """Return the section of a rank's profile by --profile: its costliest operators, and shares of its time."""
    title = f"Profile of rank {result.rank}: {path.parent.parent.name}, steps {result.first_step} to {result.last_step}"
    parts = (("input", result.input), ("compute", result.compute), ("communication", result.communication))
    shares = [[name, share(value), amount(1000 * value * result.seconds)] for name, value in parts]
    rows = [
        [one.name, f"{one.calls:,}", amount(1000 * one.seconds), share(one.seconds / result.seconds)]
        for one in result.operators
    ]
    return Section(
        title,
        text=["Input is the time between steps; operators count without what they call, on all threads."],
        tables=[
            Table("Shares of the time", ["", "share", "ms"], shares),
            Table("The costliest operators", ["", "calls", "ms", "of the time"], rows),
        ],
    )
