"""The table of cells, the ranking of strategies as far as a comparison can distinguish them, and the rules of both.

The ranking is told in plain sentences, too.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from allstep.commands.compare.cells import INDEPENDENT, Cell, Settings
from allstep.commands.compare.records import CellResult
from allstep.commands.compare.samples import Samples, ratios, resolution
from allstep.commands.shared.measure import Estimate
from allstep.commands.shared.page.document import NOTHING, Table, amount, mebibytes, median, print_table, share
from allstep.common.base.errors import print_line, printable


def print_tables(cells: Sequence[CellResult], rules: Sequence[str]) -> None:
    """Print one table for each workload, model and batch size, with a row for each measured cell."""
    for (workload, model, batch_size, arithmetic), group in itertools.groupby(cells, attrgetter("table")):
        rows = list(group)
        title = f"{workload}: {model}, {batch_size} images a step on one rank, {arithmetic}"
        print_table(replace(table_of(rows), caption=title))
        for cell in rows:
            if remark := note(cell):
                print_line(printable(f"  {name_of(cell)} on {cell.ranks}: {remark}"))
        for line in filter(None, (*answers(rows), resolution(rows))):
            print_line(printable(line))
    print("Medians over repetitions; spread is the standard deviation of a launch. Efficiencies are ratios within a")
    print(f"round; compare.json has all {len(rules)} rules.")


def table_of(cells: Sequence[CellResult]) -> Table:
    """Return the table of the measured ones of some cells; a single launch has no interval and no spread."""
    header = ["", "ranks", "images/s", "mean, 95%", "spread", "of the same on 1", "of plain", "of the limit"]
    header += [f"of {cells[0].framework}", "MiB", "start-up s", "to target s", "accuracy", "same curve"]
    rows = []
    measured = [(cell, cell.images_per_second) for cell in cells if cell.images_per_second]
    for cell, rate in measured:
        interval = f"{amount(rate.mean)} ± {amount((rate.high - rate.low) / 2)}", amount(rate.stdev)
        efficiencies = [
            share(efficiency_of(cell, name))
            for name in ("same_strategy_one_rank", "single_process", "independent", "first_framework")
        ]
        rows.append(
            [
                name_of(cell),
                str(cell.ranks),
                amount(rate.median),
                *(interval if rate.num > 1 else (NOTHING, NOTHING)),
                *efficiencies,
                mebibytes(max(cell.peak_memory_bytes_by_rank or [0]) or None),
                amount(median(cell.startup_seconds)),
                amount(median(cell.seconds_to_target)),
                share(cell.final_accuracy),
                cell.gate.status,
            ]
        )
    # Columns that only some tables have: the gain of compiling, and energy if GPUs count it.
    gains = [(cell.efficiency or {}).get("not_compiled") for cell, _ in measured]
    for title, values in (("of uncompiled", gains), ("J/image", [cell.joules_per_image for cell, _ in measured])):
        if any(values):
            header.append(title)
            rows = [[*row, f"{value.median:.3g}" if value else ""] for row, value in zip(rows, values, strict=True)]
    return Table("Medians over repetitions; spread is the standard deviation of single ones.", header, rows)


def efficiency_of(cell: CellResult, name: str) -> float | None:
    """Return the median of an efficiency of `samples.efficiency`; None if it is unknown."""
    return median((cell.efficiency or {}).get(name))


def name_of(cell: CellResult) -> str:
    """Return framework and strategy of a cell."""
    return f"{cell.framework} {cell.strategy}"


def note(cell: CellResult) -> str:
    """Return what a reader must know about a cell besides its figures."""
    remarks = []
    if cell.status != "ok":
        remarks.append(f"{cell.status}: {cell.reason}" if cell.reason else cell.status)
    if cell.images_per_second and not cell.comparable:
        remarks.append(f"not compared: {cell.gate.reason}")
    return "; ".join(remarks)


MIN_REPETITIONS = 5  # below that, neither a median nor an interval says much
_FEW = f" That is fewer than the {MIN_REPETITIONS} times from which figures mean something."
_TURNS = (
    "The cells of a table, as many as memory has room for, are started one after the other (with real input, where "
    "start-up is not measured, the next one while the one before still starts) and then run their timed blocks in "
    "turn (A B C, A B C, ...), so that other load on the machine affects all alike. Waiting ranks do nothing: "
    "those that would poll (Horovod's) are stopped meanwhile."
)


def rules(settings: Settings, *, num_rounds: int, oversubscribe: bool = False) -> Sequence[str]:
    """Return the rules, one text each."""
    core_rule = (
        "Ranks may outnumber the cores (--oversubscribe). They then share them, the independent processes as well, so "
        "that efficiency against those shows communication, and efficiency against one process the sharing of cores."
        if oversubscribe
        else "Each rank has a core, or the cell is left out."
    )
    return (
        # gate.py
        f"Parity gate: a cell is compared only after it trained {settings.gate_steps} steps on digits along the same "
        "curve (losses and weights) as the others, by the measures and bounds of allstep parity (where weights alone "
        "are apart, a ReLU's input may be within a rounding error of 0: up to two more seeds are tried; ResNets: two "
        "steps, losses to 1e-3, a curve for each number of ranks; tf32, bf16 and fp16: losses to 2e-2 within a "
        "framework and 4e-2 between them); otherwise its row says so."
        + (f" With --slices {settings.slices} a framework's curves have the same bits." if settings.slices else ""),
        # synthetic.py, real.py
        f"Warm-up is excluded: {settings.num_warmup_batches} steps of synthetic input, the first epoch of real input.",
        "The device is idle before each clock read: a block ends when its last update can be read.",
        # measuring.py
        f"Every cell is launched by its real launcher {num_rounds} times, interleaved (A B C, A B C, ...)."
        f"{_FEW if num_rounds < MIN_REPETITIONS else ''}",
        # turns.py
        *([_TURNS] if settings.turns else []),
        # cells.py
        core_rule + (" Each also has a GPU of its own, or the cell is left out." if settings.device == "cuda" else ""),
        # samples.py
        "The slowest rank counts: images of all ranks over the longest time of any rank, block by block; a launch's "
        f"speed is the median of its blocks ({settings.num_iters} blocks of {settings.num_batches_per_iter} steps of "
        f"synthetic input, {settings.epochs - 1} epochs of real input).",
        "Median, mean with its 95 % confidence interval (Student's t) and spread (standard deviation of one launch) "
        "are separate figures, over launches.",
        # cells.py
        f"All cells have {settings.threads_per_rank} thread(s) per rank and the same images; those of one table have "
        "the same model, precision and batch; compiled steps (--compile) have tables of their own, but "
        "take turns with the others.",
        "Weak scaling (the same batch per rank) and strong scaling (the same global batch) have tables of their own.",
        "Synthetic input (images made once, on the device: computation and communication) and real input "
        f"({settings.dataset} through the input pipeline) have tables of their own.",
        # samples.efficiency
        "Efficiency is a ratio to the same strategy on one rank, to a plain single process, and to as many "
        "independent processes at once, which is the machine's own limit; and a framework's speed to that of the "
        "first framework in the same place; all as ratios within a round: the geometric mean over the pairs of blocks "
        "with the same number, a fifth of them left out at either end.",
        "Strategies are ranked by their share of the limit, framework by framework on each number of ranks; one is "
        "called faster than another only where the 95 % confidence interval of the mean of their ratios is above 1.",
        f"Time to accuracy is training time to {settings.target_accuracy:.1%} validation accuracy, the first step's "
        "compilation included, without start-up and validation.",
        "Peak memory is that of each rank: of its GPU where there is one, else resident memory of its process. "
        "Start-up is from the launch to the end of the first step.",
        # jobs.py
        "A launch that exceeds its limit is ended with everything that it started; failed cells stay in the table "
        "with their reason.",
        # machine.py, measuring.py
        "The environment stands with the figures: versions, commit, processor, cores, load, governor, GPUs and their "
        "links, launchers and every variable that changes speed. An interrupted comparison goes on only with the same "
        "versions, commit, host, processor, variables and settings.",
    )


def against(cell: Cell, cells: Sequence[Cell], samples: Samples, comparable: set[str]) -> dict[str, Estimate]:
    """Return statistics of a cell's speed over that of each rival, by strategy."""
    if cell.strategy == INDEPENDENT:
        return {}
    rivals = [one for one in cells if one.strategy not in (INDEPENDENT, cell.strategy) and one.ranking == cell.ranking]
    found = {rival.strategy: ratios(cell, rival, samples, comparable) for rival in rivals}
    return {strategy: ratio for strategy, ratio in found.items() if ratio}


def is_faster(cell: CellResult, rival: str) -> bool:
    """Return whether a cell is faster than another strategy: the 95 % interval of their ratio's mean is above 1."""
    ratio = cell.against.get(rival)
    return ratio is not None and ratio.num > 1 and ratio.low > 1


def groups(cells: Sequence[CellResult]) -> dict[tuple, list[list[CellResult]]]:
    """Return the cells of each ranking that has several, in groups, the fastest group first.

    Each cell of a group is faster than all cells of later groups; which is the fastest within a group is unknown.
    The cells of a ranking are in the order of their shares of the limit, the largest first.
    """
    rankings: dict[tuple, list[tuple[float, CellResult]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.ranking):
        if share := cell.share_of_limit:
            rankings.setdefault(cell.ranking, []).append((share.median, cell))
    found = {}
    for ranking, measured in rankings.items():
        ranked = [cell for _, cell in sorted(measured, key=lambda pair: pair[0], reverse=True)]
        if len(ranked) > 1:
            found[ranking] = _groups(ranked)
    return found


def _groups(ranked: Sequence[CellResult]) -> list[list[CellResult]]:
    found = [[ranked[0]]]
    for number, cell in enumerate(ranked[1:], 1):
        if all(is_faster(one, other.strategy) for one in ranked[:number] for other in ranked[number:]):
            found.append([])
        found[-1].append(cell)
    return found


def answers(cells: Sequence[CellResult], *, is_short: bool = False) -> list[str]:
    """Return a sentence for each framework and number of ranks of a table, and one for each other framework.

    `is_short` leaves out all but the largest number of ranks on which a framework has a ranking.
    """
    comparable = [cell for cell in cells if cell.comparable]
    found = {
        cell.framework if is_short else cell.ranking: _strategies([cell, *others], later)
        for (cell, *others), *later in groups(comparable).values()  # more ranks follow fewer
    }
    return [*found.values(), *filter(None, (_frameworks(cell, comparable) for cell in comparable))]


def _strategies(fastest: Sequence[CellResult], later: Sequence[Sequence[CellResult]]) -> str:
    """Return the sentence about the strategies of one framework on as many ranks."""
    best, names = fastest[0], [cell.strategy for cell in fastest]
    leads = _listed([_lead(best, cell) for cell in itertools.chain(*later)])
    if len(fastest) == 1:
        text = f"{best.strategy} is the fastest, {leads}"
    elif difference := _largest_difference(fastest):
        text = f"{_listed(names)} are equally fast as far as is known: they differ by at most {difference:.1%}"
    else:
        text = f"{_listed(names)} were measured too few times to say which is the fastest"
    if leads and len(fastest) > 1:
        text += f"; {best.strategy} is {leads}"
    return f"{best.framework} on {ranks_of(best)}: {text}."


def _lead(one: CellResult, other: CellResult) -> str:
    ratio = one.against[other.strategy]
    return f"{ratio.mean - 1:.1%} faster than {other.strategy} ({ratio.low - 1:.1%} to {ratio.high - 1:.1%}, 95%)"


def _largest_difference(cells: Sequence[CellResult]) -> float | None:
    """Return the largest difference that the intervals of the cells' ratios allow; None if one ratio has none."""
    ratios = [one.against.get(other.strategy) for one, other in itertools.combinations(cells, 2)]
    if not all(ratio and ratio.num > 1 for ratio in ratios):
        return None
    return max(max(ratio.high - 1, 1 - ratio.low) for ratio in ratios if ratio)


def _frameworks(cell: CellResult, cells: Sequence[CellResult]) -> str:
    """Return how a cell's speed compares with that of the first framework by the same strategy; empty if unknown.

    Independent processes are named only where the frameworks have no other strategy in common.
    """
    ratio = (cell.efficiency or {}).get("first_framework")
    first = cells[0].framework
    if ratio is None or cell.framework == first or cell.ranks != max(one.ranks for one in cells):
        return ""
    shared = {one.strategy for one in cells if one.framework == first and one.ranks == cell.ranks}
    shared &= {one.strategy for one in cells if one.framework == cell.framework and one.ranks == cell.ranks}
    if cell.strategy == INDEPENDENT and shared > {INDEPENDENT}:
        return ""
    return f"{cell.strategy} on {ranks_of(cell)}: {_faster(cell.framework, first, ratio)}."


def _faster(name: str, first: str, ratio: Estimate) -> str:
    if ratio.num < 2:
        return f"{name} had {ratio.mean:.2f} times the speed of {first} in one measurement, which proves nothing"
    span = f"{ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.low <= 1 <= ratio.high:
        return f"{name} and {first} are equally fast as far as is known: {name} has {span} times the speed of {first}"
    if ratio.mean > 1:
        return f"{name} is {ratio.mean - 1:.1%} faster than {first} ({span} times its speed, 95%)"
    return f"{name} is {1 - ratio.mean:.1%} slower than {first} ({span} times its speed, 95%)"


def _listed(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def ranks_of(cell: CellResult) -> str:
    """Return the number of ranks of a cell in words."""
    return f"{cell.ranks} rank{'s' if cell.ranks > 1 else ''}"
