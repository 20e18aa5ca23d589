"""What --slices costs, as ratios of both sides measured in turn:

    python -m allstep.benchmarks.slices [--frameworks NAME,...] [--ranks 2,4] [--rounds N] [--parts NAME,...]

    ranks       Horovod, and FSDP in PyTorch, with as many slices as ranks, beside the same without --slices (cnn,
                images/s)
    one         one rank with 4 slices, beside --accumulate-steps 4
    audit       Horovod with --slices and --audit 0.25, beside --slices alone: a quarter of the steps twice is 0.8
    trace       Horovod with --slices and --trace, beside --slices alone, both with --output-dir (images/s)
    sum         the sum in fixed order of 1 to 64 MiB, beside Horovod's all-reduce (calls/s)
    wider       sums that need no order, by `wider_sums.py`, beside the all-reduce of float32 (calls/s, of 4 MiB), and
                how many different sums each has on these numbers of ranks

The exit status is 0 where all targets are reached, 1 where one is missed.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allstep.benchmarks.handwritten.data import trainer_flags
from allstep.commands.shared.launchers import train_command
from allstep.commands.shared.measure import interleaved, job, median_ratio, print_table, printed_rates, run, save
from allstep.commands.shared.records import files
from allstep.commands.shared.records.figures import Figure
from allstep.common.base.flag_types import MAX_ROUNDS, Parser, listed, local_ranks, one_of, whole
from allstep.common.catalog.strategies import FRAMEWORKS
from allstep.common.process.exit import run_rank

PARTS = ("ranks", "one", "audit", "trace", "sum", "wider")
MEBIBYTES = ("1", "4", "16", "64")
_BATCH_SIZE = 64
_STEPS_PER_EPOCH, _NUM_EPOCHS = 25, 4


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the table; end with status 1 where a target is missed."""
    parser = Parser("python -m allstep.benchmarks.slices", __doc__)
    parser.add_argument("--frameworks", type=listed(one_of(*FRAMEWORKS)), default=FRAMEWORKS, metavar="NAME,...")
    parser.add_argument("--ranks", type=listed(local_ranks()), default=(2, 4), metavar="N,...")
    parser.add_argument("--parts", type=listed(one_of(*PARTS)), default=PARTS, metavar="NAME,...")
    parser.add_argument("--rounds", type=whole(1, MAX_ROUNDS), default=3, metavar="N")
    parser.add_argument("--output", type=files.output_file, default="runs/slices.json", help="where samples are kept")
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
        for num_ranks in flags.ranks if "sum" in flags.parts else ():
            seconds = _seconds_of_sums(framework, num_ranks, flags.rounds)
            for size, pairs in seconds.items():
                reference, ours = ([1 / taken for taken in side] for side in zip(*pairs, strict=True))
                rows.append(_row(f"{framework}: sum of {size} MiB, {num_ranks} ranks", ours, reference, ">= 0.9"))
            samples[f"{framework}, sums, {num_ranks}"] = seconds
    if "wider" in flags.parts:
        found = {num_ranks: _wider_sums(num_ranks, flags.rounds) for num_ranks in flags.ranks}
        rows += _rows_of_wider(found)
        samples["wider"] = found
    print_table(rows)
    save(flags.output, rows, samples)
    if not all(row.reached for row in rows):
        sys.exit(1)


_TARGETS = {"horovod": ">= 0.95", "fsdp": ">= 0.95", "one": ">= 0.9", "audit": ">= 0.75", "trace": ">= 0.98"}
"""By the first word of what is measured."""


def _row(what: str, ours: Sequence[float], reference: Sequence[float], target: str) -> Figure:
    return Figure(what, statistics.median(ours), statistics.median(reference), median_ratio(ours, reference), target)


def _sides(framework: str, ranks: Sequence[int], parts: Sequence[str]) -> dict[str, dict[str, Callable[[], float]]]:
    """Of each thing to measure, ours and what it is compared with."""
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
    """Images per second, the median of the epochs after the first."""
    num_samples = _STEPS_PER_EPOCH * 4 * _BATCH_SIZE
    flags = (*trainer_flags(num_samples, _NUM_EPOCHS), "--batch-size", batch_size, *given_flags)
    [printed] = run(train_command(framework, strategy, num_ranks, flags))
    return statistics.median(printed_rates(printed))


def _rate_of_saved(framework: str, num_ranks: int, *given_flags: object) -> float:
    """Images per second of a run with slices and an output directory."""
    with tempfile.TemporaryDirectory(prefix="allstep-slices-") as directory:
        flags = ("--slices", num_ranks, "--output-dir", Path(directory) / "run", *given_flags)
        return _rate(framework, "horovod", num_ranks, *flags)


def _seconds_of_sums(framework: str, num_ranks: int, num_rounds: int) -> dict[str, list[list[float]]]:
    """By mebibytes, seconds of Horovod's all-reduce and of ours, a pair a round."""
    return _written("ordered_sum", framework, ",".join(MEBIBYTES), num_rounds, num_ranks=num_ranks)


def _wider_sums(num_ranks: int, num_rounds: int) -> dict[str, dict[str, Any]]:
    """What `wider_sums` writes."""
    return _written("wider_sums", 4, 5 * num_rounds, num_ranks=num_ranks)


def _rows_of_wider(found: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> Iterator[Figure]:
    """By number of ranks, what `wider_sums` wrote."""
    for num_ranks, ways in found.items():
        rates = {way: [1 / seconds for seconds in one["seconds"]] for way, one in ways.items()}
        usual = rates.pop("float32")
        yield from (_row(f"{way}, {num_ranks} ranks", ours, usual, "") for way, ours in rates.items())
    for way in next(iter(found.values())):
        number = len({ways[way]["digest"] for ways in found.values()})
        target = "<= 1" if way in ("pre-rounded", "integers") else ""
        yield Figure(f"different sums of {way}", number, 1, number, target)


def _written(name: str, *arguments: object, num_ranks: int) -> Any:
    """What a program in this folder writes into the file that is its last argument."""
    with tempfile.TemporaryDirectory(prefix="allstep-slices-") as directory:
        output = Path(directory) / "found.json"
        run(job(f"allstep.benchmarks.{name}", *arguments, output, num_ranks=num_ranks))
        return json.loads(output.read_text())


if __name__ == "__main__":
    run_rank(main)
