"""The sections of collectives, forecasts, benchmarks and training runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allstep.benchmarks.harness.launchers import LAUNCHERS, start
from allstep.benchmarks.reporting.document import NOTHING, Section, Table, amount, facts, mebibytes, share
from allstep.benchmarks.reporting.figures import Line, bars, lines
from allstep.benchmarks.reporting.sources import RecordedRun


def collectives(content: dict[str, Any]) -> Section:
    """A result of `allstep collectives`."""
    section = Section(f"Collectives on {content['ranks']} ranks", commands=[content["command"]])
    rows = content["rows"]
    for collective in dict.fromkeys(row["collective"] for row in rows if row["collective"] != "copy"):
        shown = [row for row in rows if row["collective"] in (collective, "copy")]
        curves = []
        for backend in dict.fromkeys(row["backend"] for row in shown):
            own = [row for row in shown if row["backend"] == backend]
            values = [row["bus_bandwidth"] / 1e9 for row in own]
            curves.append(Line(backend, [row["bytes"] for row in own], values, reference=backend == "memcpy"))
        section.figures.append(
            lines(
                f"Bus bandwidth of {collective}",
                curves,
                x_label="bytes",
                y_label="GB/s",
                x_scale="log2",
                y_scale="log10",
            )
        )
    times = ["min µs", "avg µs", "max µs", "median µs"]
    header = ["library", "collective", "bytes", *times, "algorithm GB/s", "bus GB/s", "result"]
    section.tables.append(
        Table(
            "Times over ranks of the fastest pass, and the median over passes; bandwidths as nccl-tests define them.",
            header,
            [
                [
                    row["backend"],
                    row["collective"],
                    f"{row['bytes']:,}",
                    *(amount(1e6 * row["seconds"][name]) for name in ("minimum", "average", "maximum")),
                    amount(1e6 * row["median_seconds"]),
                    *(amount(row[name] / 1e9) for name in ("algorithm_bandwidth", "bus_bandwidth")),
                    "right" if row["right"] else "WRONG",
                ]
                for row in rows
            ],
        )
    )
    if ratios := content.get("horovod_over_mpi"):
        kinds = ("ratio", "ratio_of_medians")
        shown = [[row["backend"], f"{row['bytes']:,}", *(f"{row[kind]:.2f}" for kind in kinds)] for row in ratios]
        header = ["", "bytes", "fastest passes", "medians"]
        section.tables.append(Table("Horovod's all-reduce bandwidth over MPI's", header, shown))
    if found := content.get("recommendation"):
        section.text.append(
            f"Recommended for {found['network']} at {found['step_ms']:g} ms a step: fusion threshold "
            f"{found['threshold']:,.0f} bytes, cycle time {found['cycle_ms']:g} ms."
        )
    for what, ratio in content.get("tuning", {}).get("ratios", {}).items():
        section.text.append(f"Training, images/s, {what}: {ratio:.3f}.")
    section.items = [f"{name} failed: {why}" for name, why in content["failures"].items()]
    section.items += [f"{name} has no {', '.join(lacks)}" for name, lacks in content["missing"].items() if lacks]
    section.tables.append(Table("Environment", ["", ""], [list(pair) for pair in facts(content["variables"])]))
    return section


def forecast(content: dict[str, Any]) -> Section:
    """A result of `allstep predict --output`."""
    rows = content["forecasts"]
    ranks = [row["num_ranks"] for row in rows]
    curves = [
        Line("forecast", ranks, [row["efficiency"] for row in rows]),
        Line("ideal", ranks, [1.0] * len(ranks), reference=True),
    ]
    table = [
        [
            f"{row['num_ranks']:,}",
            amount(1000 * row["total"]),
            share(row["efficiency"]),
            amount(row["images_per_second"]),
            f"{row['bottleneck']} {share(row['bottleneck_share'])}",
            f"{row['helps'][0]}: {share(row['helps'][1])}" if row["helps"] else NOTHING,
        ]
        for row in rows
    ]
    header = ["ranks", "step ms", "efficiency", "samples/s", "costs most", "helps most"]
    figure = lines("Forecast efficiency", curves, x_label="ranks", y_label="", x_scale="log10", percent=True)
    return Section("Forecast", figures=[figure], tables=[Table("", header, table)], commands=[content["command"]])


def validation(content: dict[str, Any]) -> Section:
    """A result of `allstep predict --validate --output`: every row, and plainly what misses."""
    rows, bound = content["rows"], 100 * content["largest_error"]
    missed = [row for row in rows if abs(row["error"]) > content["largest_error"]]
    told = (
        f"{len(rows) - len(missed)} of {len(rows)} efficiencies are forecast within {bound:g} points. A row from which "
        "a parameter was estimated says little about the error."
    )
    section = Section("Forecasts beside measurements", text=[told, *content["notes"]], commands=[content["command"]])
    section.items = [
        f"MISSED by {100 * abs(row['error']):.1f} points: {row['title']}, {row['system']}, {row['network']} on "
        f"{row['num_ranks']} ranks"
        for row in missed
    ]
    table = [
        [
            row["title"],
            row["system"],
            row["network"],
            f"{row['num_ranks']}" + (f" over {row['baseline_ranks']}" if row["baseline_ranks"] > 1 else ""),
            *(share(row[name]) for name in ("measured", "forecast")),
            f"{100 * row['error']:+.1f}",
            "NO" if row in missed else "yes",
            row["estimated"] or NOTHING,
        ]
        for row in rows
    ]
    header = ["measured by", "", "network", "ranks", "measured", "forecast", "points", f"within {bound:g}", "estimated"]
    section.tables.append(Table("Efficiency", header, table))
    return section


def benchmark(path: Path, content: dict[str, Any]) -> Section:
    """What a benchmark kept by `measure.save`."""
    rows = [
        [
            figure["what"],
            amount(figure["ours"]),
            amount(figure["reference"]),
            amount(figure["ratio"]),
            figure["target"],
            ("yes" if figure["reached"] else "NO") if figure["target"] else "",
        ]
        for figure in content["figures"]
    ]
    table = Table("", ["", "ours", "reference", "ratio", "target", "reached"], rows)
    name = path.stem.replace("_", " ").capitalize()
    text = [f"Measured {content['time']}."] if "time" in content else []
    return Section(f"{name}: ours beside a reference", text=text, tables=[table])


def runs(found: Sequence[tuple[Path, RecordedRun]]) -> Section:
    """Training runs over each other."""
    section = Section("Training runs")
    losses, accuracies, memory, rows = [], [], [], []
    for path, run in found:
        label = f"{path.name}: {run.start['framework']} {run.start['strategy']}, {run.start['world_size']} ranks"
        epochs = [epoch["epoch"] for epoch in run.epochs]
        if epochs:
            losses.append(Line(label, epochs, [epoch["train_loss"] for epoch in run.epochs]))
            seconds = [epoch["cumulative_seconds"] for epoch in run.epochs]
            accuracies.append(Line(label, seconds, [epoch["validation_accuracy"] for epoch in run.epochs]))
        if run.end and run.end.get("peak_memory_bytes"):
            memory.append((path.name, run.end["peak_memory_bytes"] / 2**20))
        last = run.epochs[-1] if run.epochs else {}
        rows.append(
            [
                path.name,
                f"{run.start['framework']} {run.start['strategy']}",
                str(run.start["world_size"]),
                str(run.start["global_batch_size"]),
                str(len(run.epochs)),
                amount(last.get("train_loss")),
                share(last.get("validation_accuracy")),
                amount(last.get("cumulative_seconds")),
                amount(last.get("images_per_second")),
                mebibytes(run.end.get("peak_memory_bytes")) if run.end else "did not end",
            ]
        )
        if run.config:
            section.commands.append(_command(run.config, run))
    if losses:
        section.figures.append(lines("Training loss", losses, x_label="epoch", y_label="loss"))
        caption = "Validation accuracy against training time"
        section.figures.append(lines(caption, accuracies, x_label="seconds", y_label="accuracy"))
    if memory:
        section.figures.append(bars("Peak memory of rank 0", *zip(*memory, strict=True), x_label="MiB"))
    header = ["run", "", "ranks", "global batch", "epochs", "loss", "accuracy", "seconds", "images/s", "MiB"]
    section.tables.append(Table("The last epoch of each run", header, rows))
    return section


def _command(config: Path, run: RecordedRun) -> str:
    """The command that trains as the run did, on as many ranks by the same launcher."""
    name = str(run.start.get("launcher"))
    name = "mpiexec" if name == "PMI" else name
    # A run that was started alone starts its ranks by itself.
    program = start(name if name in LAUNCHERS else None, run.start["world_size"])
    return shlex.join([*program, f"{run.start['framework']}/train.py", "--config", str(config)])
