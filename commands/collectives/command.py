"""Measure collectives in MPI, Horovod, torch.distributed and tf.distribute, and recommend settings for Horovod.

    allstep collectives --ranks 2
    allstep collectives --backends mpi4py,horovod-torch --collectives all-reduce --sizes 1048576,67108864
    allstep collectives --backends mpi4py,horovod-tensorflow --ranks 4
    allstep collectives --tune

Starts the ranks with each library's launcher, in interleaved rounds, checks every result, and prints size, time,
algorithm bandwidth and bus bandwidth as nccl-tests define them (doc/PERFORMANCE.md there): S/t, and S/t times 2(n-1)/n
for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all, 1 for broadcast. S is the output's size for
all-gather and the input's for the others. A launch passes over the sizes three times; a rank's time is the median of
several runs in a pass. The table has minimum, average and maximum over ranks of the fastest pass, and the average's
median over passes. Where a hypervisor moves cores between shared and separate caches, MPI takes 0.2 or 0.8 ms for a
MiB, changing by the second: fastest passes are comparable between libraries, medians are not. `memcpy` copies the
buffer on every rank at once and is the limit. `mpi4py` is MPI without a framework.

Recommends HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME for a network from Horovod's times; --tune trains with and
without them and prints the ratio. The exit status is 1 if a result was wrong or a library failed.
"""

import dataclasses
import os
import shutil
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence

from allstep.commands.collectives.backends import BACKENDS, COLLECTIVES, horovod_settings
from allstep.commands.collectives.section import table_of
from allstep.commands.forecast.networks import known_networks
from allstep.commands.shared.jobs import Outcome, environment, run_job, scratch_folder, start
from allstep.commands.shared.machine import variables
from allstep.commands.shared.page.document import print_table
from allstep.commands.shared.records import files
from allstep.commands.shared.records.collectives import CollectivesResult, OverMpi, OverRanks, RankResult, RankRow, Row
from allstep.common.base.checkout import setup_command
from allstep.common.base.errors import Fault, UserError, print_line, quote
from allstep.common.base.flag_types import MAX_COUNT, MAX_ROUNDS, WEEK, Parser, listed, local_ranks, one_of, whole
from allstep.common.catalog.networks import IMAGE_MODELS, MODELS
from allstep.common.process.requirements import need

_BUS_FACTORS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
_NO_HUGE_PAGES = ("env", "NUMPY_MADVISE_HUGEPAGE=0")
"""NumPy asks for huge pages from 4 MiB on; torch and TensorFlow do not, so mpi4py and memcpy would look too fast."""
SIZES = tuple(8 * 8**power for power in range(9)) + (2**28,)
"""8 B to 128 MiB by factors of 8, and 256 MiB."""
_TUNABLE = [name for name in IMAGE_MODELS if MODELS[name].smallest_image <= 28]
"""Networks that accept the trainers' synthetic images of 28 x 28 pixels."""


def bus_bandwidth(collective: str, num_bytes: int, seconds: float, num_ranks: int) -> float:
    """Return the minimum bytes per second over each rank's link: comparable across collectives and world sizes."""
    moved = _BUS_FACTORS[collective] * (num_ranks - 1) / num_ranks if collective in _BUS_FACTORS else 1
    return num_bytes / seconds * moved


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the results; exit with status 1 if a result was wrong or a library failed."""
    flags = _flags(argv)
    for name in flags.backends:
        need(BACKENDS[name].packages, by=f"--backends {name}")
    samples: dict[str, list[list[tuple[RankRow, ...]]]] = {name: [] for name in flags.backends}
    missing: dict[str, tuple[str, ...]] = {}
    failures: dict[str, str] = {}
    for number in range(flags.rounds):
        for name in flags.backends:
            if name in failures:
                continue
            print_line(f"round {number + 1} of {flags.rounds}: {name}", sys.stderr)
            try:
                ranks = launch(name, flags.collectives, flags.sizes, flags.ranks, time_limit=flags.time_limit)
            except (Fault, UserError) as error:
                failures[name] = str(error)
                print_line(f"{name}: failed: {failures[name]}", sys.stderr)
                continue
            missing[name] = ranks[0].missing
            samples[name].append([rank.rows for rank in ranks])
    rows = [row for name, rounds in samples.items() if rounds for row in summed_up(name, rounds)]
    print_table(table_of(rows))
    print("".join(f"{name} has no {', '.join(lacking)}\n" for name, lacking in missing.items() if lacking), end="")
    ratios = horovod_over_mpi(rows)
    for one in ratios:
        medians = f"(medians {one.ratio_of_medians:.2f})"
        print(f"bandwidth of {one.backend} / mpi4py, all-reduce of {one.bytes:,} bytes: {one.ratio:.2f} {medians}")
    costs = horovod_settings.costs_of(rows)
    recommendation = horovod_settings.recommend(costs, flags.network, flags.step_ms) if costs else None
    result = CollectivesResult(
        time=files.now(),
        command=files.command("collectives", argv),
        ranks=flags.ranks,
        rounds=flags.rounds,
        load_average=os.getloadavg(),
        num_cores=len(os.sched_getaffinity(0)),
        variables=variables(environment()),
        rows=tuple(rows),
        missing=missing,
        failures=failures,
        horovod_over_mpi=tuple(ratios),
        recommendation=recommendation,
    )
    files.write_output(flags.output, result)
    if recommendation:
        print(horovod_settings.sentence(recommendation))
        if flags.tune:
            tuning = horovod_settings.try_out(recommendation, flags.ranks, flags.rounds)
            files.write_output(flags.output, dataclasses.replace(result, tuning=tuning))
    if failures or not all(row.right for row in rows):
        sys.exit(1)


def _flags(argv: Sequence[str] | None) -> Namespace:
    parser = Parser("allstep collectives", __doc__)
    add = parser.add_argument
    add("--ranks", type=local_ranks(2), default=2, metavar="N")
    add("--backends", type=listed(one_of(*BACKENDS)), default=tuple(BACKENDS), metavar="NAME,...")
    add("--collectives", type=listed(one_of(*COLLECTIVES)), default=COLLECTIVES, metavar="NAME,...")
    add("--sizes", type=listed(whole(1, 2**40)), default=SIZES, metavar="BYTES,...")
    add("--rounds", type=whole(1, MAX_ROUNDS), default=3, metavar="N", help="launches of each library")
    add("--network", default="cnn", metavar="NAME", help="network to recommend for; see forecast --help")
    add("--step-ms", type=whole(1, MAX_COUNT), default=40, metavar="MS", help="step time on one rank")
    add("--tune", action="store_true", help="train with and without the recommended settings")
    add("--time-limit", type=whole(1, WEEK), default=300, metavar="SECONDS", help="limit of a launch")
    add("--output", type=files.output_file, default="runs/collectives.json", metavar="FILE")
    flags = parser.parse_args(argv)
    networks = [name for name in known_networks() if name in _TUNABLE or not flags.tune]
    if flags.network not in networks:
        parser.error(
            f"expected --network to be one of {', '.join(networks)}, received {quote(flags.network)}; name one"
        )
    # Each rank holds a send and a receive buffer for every size at the same time.
    needed, memory = 2 * flags.ranks * sum(flags.sizes), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        parser.error(
            f"expected messages for the {memory / 2**30:.3g} GiB of this machine, received --sizes "
            f"{','.join(map(str, flags.sizes))} for {flags.ranks} ranks, which take "
            f"{needed / 2**30:.3g} GiB; lower them"
        )
    return flags


def launch(
    name: str, collectives: Sequence[str], sizes: Sequence[int], num_ranks: int, *, time_limit: float
) -> list[RankResult]:
    """Measure one library once and return what each rank wrote, by rank.

    Raises UserError if the launcher is not installed; Fault if the job failed, or it hung and was ended with all its
    processes.
    """
    launcher = start(BACKENDS[name].launcher, num_ranks)
    if shutil.which(launcher[0], path=environment()["PATH"]) is None:
        raise UserError(f"expected {launcher[0]} on the path, received none; run {setup_command()}")
    wanted = ["copy"] if name == "memcpy" else collectives
    with scratch_folder("collectives") as directory:
        worker = "allstep.commands.collectives.backends.worker"
        texts = (",".join(wanted), ",".join(map(str, sizes)))
        command = [*_NO_HUGE_PAGES, *launcher, "-m", worker, name, *texts, directory]
        outcome = run_job([command], time_limit=time_limit, num_threads=1)
        if outcome.status != "ok":
            raise Fault(_reason(outcome))
        return [files.read_json(RankResult, directory / f"rank-{rank}.json") for rank in range(num_ranks)]


def summed_up(name: str, rounds: Sequence[Sequence[Sequence[RankRow]]]) -> list[Row]:
    """Return the rows of one library, each with its fastest pass (by average over ranks) and its median pass.

    `rounds` are the rows that each rank wrote, by round and rank.
    """
    num_ranks, found = len(rounds[0]), []
    for number, row in enumerate(rounds[0][0]):
        by_rank = [[rank[number].seconds for rank in ranks] for ranks in rounds]
        passes = [seconds for ranks in by_rank for seconds in zip(*ranks, strict=True)]
        fastest = min(passes, key=statistics.fmean)
        average = statistics.fmean(fastest)
        found.append(
            Row(
                backend=name,
                collective=row.collective,
                bytes=row.bytes,
                seconds=OverRanks(min(fastest), average, max(fastest)),
                median_seconds=statistics.median(map(statistics.fmean, passes)),
                algorithm_bandwidth=row.bytes / average,
                bus_bandwidth=bus_bandwidth(row.collective, row.bytes, average, num_ranks),
                right=all(rank[number].right for ranks in rounds for rank in ranks),
                passes=tuple(passes),
            )
        )
    return found


def horovod_over_mpi(rows: Sequence[Row]) -> list[OverMpi]:
    """Return Horovod's all-reduce bandwidth over mpi4py's at each size, for the fastest passes and for the medians."""
    reduced = [row for row in rows if row.collective == "all-reduce"]
    mpis = {row.bytes: row for row in reduced if row.backend == "mpi4py"}
    pairs = [(row, mpis[row.bytes]) for row in reduced if BACKENDS[row.backend].is_horovod and row.bytes in mpis]
    return [
        OverMpi(row.backend, row.bytes, row.bus_bandwidth / mpi.bus_bandwidth, mpi.median_seconds / row.median_seconds)
        for row, mpi in pairs
    ]


def _reason(outcome: Outcome) -> str:
    """Return why a launch failed, in one line: the error that a rank reported, else the log's last lines' first."""
    log, reason = outcome.log or "", outcome.reason or ""
    lines = [line for line in log.splitlines() if line.strip(" -")]
    named = "allstep: " in reason or outcome.status == "timeout" or not lines
    return " ".join((reason if named else f"{reason}: {lines[0]}").split())[:300]
