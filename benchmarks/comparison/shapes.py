"""The shapes of result files: what those who read them rely on. They come from anywhere: a report takes directories."""

from __future__ import annotations

from typing import Any

from allstep.common.files.schema import (
    Mismatch,
    flag,
    list_of,
    mapping,
    mapping_of,
    nullable,
    number,
    one_of,
    record,
    text,
    whole,
)

_POSITIVE = number(1e-30)
_MEDIAN = record(median=number())
_RATE = record(median=_POSITIVE, mean=number(), low=number(), high=number(), stdev=number(0))

PLACED = record(
    workload=text, framework=text, strategy=text, model=text, batch_size=whole(1), precision=text, ranks=whole(1)
)
"""A cell of a comparison: where it stands."""

COMPARED = record(
    id=text,
    efficiency=nullable(mapping_of(record(num=whole(), median=_POSITIVE, mean=_POSITIVE, high=number()))),
    against=mapping_of(record(num=whole(), low=number())),
)
"""A cell of a comparison: how fast it was beside others."""

_MEASURED = record(
    workload=one_of("synthetic-weak", "synthetic-strong", "real-weak", "real-strong"),
    status=text,
    reason=nullable(text),
    gate=record(status=text, reason=nullable(text)),
    comparable=flag,
    command=text,
    images_per_second=nullable(_RATE),
    startup_seconds=nullable(_MEDIAN),
    seconds_to_target=nullable(_MEDIAN),
    final_accuracy=nullable(number()),
    peak_memory_bytes_by_rank=nullable(list_of(number(0))),
    curve=nullable(
        list_of(record(epoch=number(), seconds=number(), train_loss=number(), validation_accuracy=number()))
    ),
)


def shares_cell(value: Any, where: str) -> None:
    """A cell whose shares of the machine's limit are looked at."""
    PLACED(value, where)
    COMPARED(value, where)


def reported_cell(value: Any, where: str) -> None:
    """A cell as a report shows it."""
    shares_cell(value, where)
    _MEASURED(value, where)
    if value["comparable"] and not value["images_per_second"]:
        raise Mismatch(f"expected {where}.images_per_second where it is comparable, received none")


def _helps(value: Any, where: str) -> None:
    list_of(lambda *_: None, least=2, most=2)(value, where)
    text(value[0], f"{where}[0]")
    number()(value[1], f"{where}[1]")


MEASURED_TIMES = record(
    ranks=whole(1),
    rows=list_of(record(backend=text, collective=text, bytes=whole(1), seconds=record(average=_POSITIVE))),
)
"""What forecasts of a comparison take from a result of `allstep collectives`."""

MEASURED_LINK = record(
    ranks=whole(2),
    rows=list_of(
        record(
            backend=text,
            collective=text,
            bytes=whole(1),
            seconds=record(average=_POSITIVE),
            bus_bandwidth=_POSITIVE,
        )
    ),
)
"""What a link is estimated from."""

_ROW = record(
    backend=text,
    collective=text,
    bytes=whole(),
    seconds=record(minimum=number(0), average=number(0), maximum=number(0)),
    median_seconds=number(0),
    algorithm_bandwidth=number(0),
    bus_bandwidth=number(0),
    right=flag,
)
_COLLECTIVES = record(
    {
        "horovod_over_mpi": nullable(
            list_of(record(backend=text, bytes=whole(), ratio=number(), ratio_of_medians=number()))
        ),
        "recommendation": nullable(
            record(network=text, step_ms=number(), threshold=number(), cycle_ms=number()),
        ),
        "tuning": record({"ratios": mapping_of(number())}),
    },
    ranks=whole(1),
    rows=list_of(_ROW),
    command=text,
    failures=mapping_of(text),
    missing=mapping_of(list_of(text)),
    variables=mapping,
)
_FORECAST = record(
    num_ranks=whole(1),
    total=number(),
    efficiency=number(),
    images_per_second=number(),
    bottleneck=text,
    bottleneck_share=number(),
    helps=nullable(_helps),
)
_VALIDATED = record(
    title=text,
    system=text,
    network=text,
    num_ranks=whole(1),
    baseline_ranks=whole(1),
    measured=number(),
    forecast=number(),
    error=number(),
    estimated=nullable(text),
)
_FIGURE = record(what=text, target=text, reached=nullable(flag), ours=number(), reference=number(), ratio=number())

REPORTED = {
    "allstep-compare": record(
        cells=list_of(reported_cell),
        rules=list_of(text),
        environment=mapping,
        updated=text,
        finished=flag,
        command=text,
    ),
    "allstep-collectives": _COLLECTIVES,
    "allstep-predict": record(command=text, forecasts=list_of(_FORECAST, least=1)),
    "allstep-validation": record(command=text, largest_error=number(), rows=list_of(_VALIDATED), notes=list_of(text)),
    "allstep-benchmark": record({"time": text}, figures=list_of(_FIGURE), samples=lambda *_: None),
}
"""By format, what a report shows."""

BLOCKS = record({"blocks": nullable(list_of(record(images_per_second=_POSITIVE)))})
"""A sample: the speeds within a launch."""

FORECAST_CELLS = record(
    settings=record(num_batches_per_iter=whole(1)),
    cells=list_of(record(workload=text, comparable=flag)),
)
"""What forecasts take from a comparison; of the cells that they take, `FORECAST_CELL`."""

_SPEED = record(median=_POSITIVE)
_SINGLE_PROCESS = record(single_process=_SPEED)


def forecast_cell(value: Any, where: str) -> None:
    """A cell that is forecast."""
    PLACED(value, where)
    record(id=text, efficiency=_SINGLE_PROCESS, images_per_second=_SPEED, samples=list_of(text))(value, where)


START = record(framework=text, strategy=text, world_size=whole(1), global_batch_size=whole(1))
"""The event at the start of a run."""

EPOCH = record(
    {"images_per_second": nullable(number())},
    epoch=number(),
    train_loss=number(),
    validation_accuracy=number(),
    cumulative_seconds=number(),
)
"""The event after an epoch."""

END = record({"peak_memory_bytes": nullable(number(0))})
"""The event at the end of a run."""
