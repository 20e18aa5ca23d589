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

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from allstep.benchmarks.handwritten.data import trainer_flags
from allstep.benchmarks.runner import benchmark
from allstep.commands.shared.launchers import train_command
from allstep.commands.shared.measure import compared, interleaved, new_output, printed_rates, run
from allstep.commands.shared.records.figures import Figure
from allstep.common.base.flag_types import listed, local_ranks, one_of
from allstep.common.process.exit import run_rank

PARTS = ("ranks", "one", "audit", "trace")
_BATCH_SIZE = 64
_STEPS_PER_EPOCH, _NUM_EPOCHS = 25, 4


def measure(framework: str, flags: argparse.Namespace, folder: Path) -> tuple[list[Figure], object]:
    """Return the rows of one framework, and the images per second of each round."""
    sides = _sides(framework, flags.ranks, flags.parts, folder)
    rates = interleaved({name: rate for pair in sides.values() for name, rate in pair.items()}, flags.rounds)
    return [
        compared(f"{framework}: {what}", *(rates[name] for name in pair), target=_TARGETS[what.split()[0]])
        for what, pair in sides.items()
    ], rates


_TARGETS = {"horovod": ">= 0.95", "fsdp": ">= 0.95", "one": ">= 0.9", "audit": ">= 0.75", "trace": ">= 0.98"}
"""Targets by the first word of a measurement's name."""


def _sides(
    framework: str, ranks: Sequence[int], parts: Sequence[str], folder: Path
) -> dict[str, dict[str, Callable[[], float]]]:
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
            saved = functools.partial(_rate_of_saved, framework, num_ranks, folder)
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


def _rate_of_saved(framework: str, num_ranks: int, folder: Path, *given_flags: object) -> float:
    """Return the images per second of a run with slices and an output directory."""
    flags = ("--slices", num_ranks, "--output-dir", new_output(folder), *given_flags)
    return _rate(framework, "horovod", num_ranks, *flags)


_FLAGS = {
    "--ranks": {"type": listed(local_ranks()), "default": (2, 4), "metavar": "N,..."},
    "--parts": {"type": listed(one_of(*PARTS)), "default": PARTS, "metavar": "NAME,..."},
}
main = benchmark("slices", __doc__, measure, rounds=3, flags=_FLAGS)

if __name__ == "__main__":
    run_rank(main)
