"""The section of a report, and the table on the terminal, of a result of `allstep collectives`."""

from collections.abc import Sequence
from dataclasses import astuple

from allstep.commands.shared.page.document import Section, Table, amount, facts
from allstep.commands.shared.page.figures import Line, lines
from allstep.commands.shared.records.collectives import CollectivesResult, Row


def table_of(rows: Sequence[Row]) -> Table:
    """Return the table of times and bandwidths."""
    times = ["min µs", "avg µs", "max µs", "median µs"]
    header = ["library", "collective", "bytes", *times, "algorithm GB/s", "bus GB/s", "result"]
    cells = [
        [
            *(row.backend, row.collective, f"{row.bytes:,}"),
            *(amount(1e6 * seconds) for seconds in (*astuple(row.seconds), row.median_seconds)),
            *(amount(bandwidth / 1e9) for bandwidth in (row.algorithm_bandwidth, row.bus_bandwidth)),
            "right" if row.right else "WRONG",
        ]
        for row in rows
    ]
    caption = "Times over ranks of the fastest pass, and the median over passes; bandwidths as nccl-tests define them."
    return Table(caption, header, cells)


def collectives(result: CollectivesResult) -> Section:
    """Return the section of a result of `allstep collectives`."""
    section = Section(f"Collectives on {result.ranks} ranks", commands=[result.command])
    rows = result.rows
    for collective in dict.fromkeys(row.collective for row in rows if row.collective != "copy"):
        compared = [row for row in rows if row.collective in (collective, "copy")]
        curves = []
        for backend in dict.fromkeys(row.backend for row in compared):
            points = [(row.bytes, row.bus_bandwidth / 1e9) for row in compared if row.backend == backend]
            sizes, bandwidths = zip(*points, strict=True)
            curves.append(Line(backend, sizes, bandwidths, reference=backend == "memcpy"))
        caption = f"Bus bandwidth of {collective}"
        figure = lines(caption, curves, x_label="bytes", y_label="GB/s", x_scale="log2", y_scale="log10")
        section.figures.append(figure)
    section.tables.append(table_of(rows))
    if ratios := result.horovod_over_mpi:
        cells = [[one.backend, f"{one.bytes:,}", f"{one.ratio:.2f}", f"{one.ratio_of_medians:.2f}"] for one in ratios]
        header = ["", "bytes", "fastest passes", "medians"]
        section.tables.append(Table("Horovod's all-reduce bandwidth over MPI's", header, cells))
    if found := result.recommendation:
        section.text.append(
            f"Recommended for {found.network} at {found.step_ms:g} ms a step: fusion threshold "
            f"{found.threshold:,.0f} bytes, cycle time {found.cycle_ms:g} ms."
        )
    for what, ratio in result.tuning.ratios.items() if result.tuning else ():
        section.text.append(f"Training, images/s, {what}: {ratio:.3f}.")
    section.items = [f"{name} failed: {why}" for name, why in result.failures.items()]
    section.items += [f"{name} has no {', '.join(lacks)}" for name, lacks in result.missing.items() if lacks]
    section.tables.append(Table("Environment", ["", ""], [list(pair) for pair in facts(result.variables)]))
    return section
