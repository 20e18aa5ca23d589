"""Measure what --slices costs, as ratios of two sides that are measured in turn:

    python -m allstep.benchmarks.slices [--frameworks NAME,...] [--ranks 2,4] [--rounds N] [--parts NAME,...]

    ranks       Horovod, and FSDP in PyTorch, with as many slices as ranks, against the same without --slices (cnn,
                images/s)
    one         one rank with 4 slices, against --accumulate-steps 4
    audit       Horovod with --slices and --audit 0.25, against only --slices; repeating a quarter of the steps is 0.8
    trace       Horovod with --slices and --trace, against only --slices, both with --output-dir (images/s)

The exit status is 0 if all targets are reached, 1 otherwise.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from allstep.benchmarks.handwritten.data import trainer_flags
from allstep.benchmarks.runner import benchmark_parser, conclude
from allstep.commands.shared.launchers import train_command
from allstep.commands.shared.measure import interleaved, median_ratio, printed_rates, run
from allstep.commands.shared.records.figures import Figure
from allstep.common.base.flag_types import listed, local_ranks, one_of
from allstep.common.process.exit import run_rank

PARTS = ("ranks", "one", "audit", "trace")
_BATCH_SIZE = 64
_STEPS_PER_EPOCH, _NUM_EPOCHS = 25, 4


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; exit with status 1 if a target is missed."""
    parser = benchmark_parser("slices", __doc__, rounds=3)
    parser.add_argument("--ranks", type=listed(local_ranks()), default=(2, 4), metavar="N,...")
    parser.add_argument("--parts", type=listed(one_of(*PARTS)), default=PARTS, metavar="NAME,...")
    flags = parser.parse_args(argv)
    rows: list[Figure] = []
    samples: dict[str, object] = {}
    for framework in flags.frameworks:
        sides = _sides(framework, flags.ranks, flags.parts)
        rates = interleaved({name: measure for pair in sides.values() for name, measure in pair.items()}, flags.rounds)
        for what, pair in sides.items():
            ours, reference = (rates[name] for name in pair)
            rows.append(_row(f"{framework}: {what}", ours, reference, _TARGETS[what.split()[0]]))
        samples[framework] = rates
    conclude(flags.output, rows, samples)


_TARGETS = {"horovod": ">= 0.95", "fsdp": ">= 0.95", "one": ">= 0.9", "audit": ">= 0.75", "trace": ">= 0.98"}
"""Targets by the first word of a measurement's name."""


def _row(what: str, ours: Sequence[float], reference: Sequence[float], target: str) -> Figure:
    return Figure(what, statistics.median(ours), statistics.median(reference), median_ratio(ours, reference), target)


def _sides(framework: str, ranks: Sequence[int], parts: Sequence[str]) -> dict[str, dict[str, Callable[[], float]]]:
    """Return, for each measurement, functions that measure our rate and the one that it is compared with."""
    sides = {}
    for num_ranks in ranks:
        rate = functools.partial(_rate, framework, "horovod", num_ranks)
        name = f"horovod --slices {num_ranks}, {num_ranks} ranks"
        sliced = {f"{framework}: {name}": functools.partial(rate, "--slices", num_ranks)}
        if "ranks" in parts:
            sides[name] = {**sliced, f"{framework}: horovod, {num_ranks} ranks": rate}
            if framework == "pytorch":
                fsdp = functools.partial(_rate, framework, "fsdp", num_ranks)
                name = f"fsdp --slices {num_ranks}, {num_ranks} ranks"
                sides[name] = {name: functools.partial(fsdp, "--slices", num_ranks), f"fsdp, {num_ranks} ranks": fsdp}
        if "audit" in parts:
            audited = functools.partial(rate, "--slices", num_ranks, "--audit", 0.25)
            sides[f"audit of 0.25, {num_ranks} ranks"] = {f"{framework}: audit, {num_ranks} ranks": audited, **sliced}
        if "trace" in parts:
            saved = functools.partial(_rate_of_saved, framework, num_ranks)
            traced = functools.partial(saved, "--trace")
            names = (f"{framework}: {what}, {num_ranks} ranks" for what in ("trace", "no trace"))
            sides[f"trace of steps, {num_ranks} ranks"] = dict(zip(names, (traced, saved), strict=True))
    if "one" in parts:
        rate = functools.partial(_rate, framework, "single", 1)
        name = "one rank with 4 slices"
        sides[name] = {
            f"{framework}: {name}": functools.partial(rate, "--slices", 4, batch_size=4 * _BATCH_SIZE),
            f"{framework}: one rank in 4 passes": functools.partial(rate, "--accumulate-steps", 4),
        }
    return sides


def _rate(framework: str, strategy: str, num_ranks: int, *given_flags: object, batch_size: int = _BATCH_SIZE) -> float:
    """Return the images per second, the median of the epochs after the first."""
    num_samples = _STEPS_PER_EPOCH * 4 * _BATCH_SIZE
    flags = (*trainer_flags(num_samples, _NUM_EPOCHS), "--batch-size", batch_size, *given_flags)
    [printed] = run(train_command(framework, strategy, num_ranks, flags))
    return statistics.median(printed_rates(printed))


def _rate_of_saved(framework: str, num_ranks: int, *given_flags: object) -> float:
    """Return the images per second of a run with slices and an output directory."""
    with tempfile.TemporaryDirectory(prefix="allstep-slices-") as directory:
        flags = ("--slices", num_ranks, "--output-dir", Path(directory) / "run", *given_flags)
        return _rate(framework, "horovod", num_ranks, *flags)


if __name__ == "__main__":
    run_rank(main)
