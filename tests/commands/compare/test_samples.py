"""Statistics of a comparison's samples. Oracles: SciPy, and hand-computed figures."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import scipy  # scipy.stats is imported when it is used
from compared import cell, made, output, result
from compared import estimate as estimated

from allstep.commands.compare import samples
from allstep.commands.compare.records import CellResult, Verdict
from allstep.commands.compare.table import note
from allstep.commands.shared.jobs import Outcome
from allstep.commands.shared.measure import Estimate, estimate
from allstep.commands.shared.records.measured import Block, Measured

efficiency = functools.partial(samples.efficiency, first_framework="pytorch")


@pytest.mark.parametrize("values", [[3.0, 1.0, 4.0, 1.0, 5.0], [2.0, 9.0], [7.0, 7.0, 7.0]])
def test_estimate_is_scipys(values):
    found = estimate(values)
    low = high = values[0]  # SciPy returns NaN for an interval without spread
    if len(set(values)) > 1:
        low, high = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values))
    assert (found.num, found.median, found.min, found.max) == (len(values), np.median(values), min(values), max(values))
    assert (found.mean, found.stdev) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert (found.low, found.high) == pytest.approx((low, high))


def test_a_single_sample_has_no_spread():
    assert estimate([4.0]) == Estimate(1, 4, 4, 4, 4, 0, 4, 4)


def test_the_slowest_rank_counts_and_the_median_block():
    sample = made(cell(), 0, output([1.0, 2.0], [4.0, 1.0], [1.0, 1.0]))
    assert [block.images_per_second for block in sample.blocks] == [50, 25, 100]
    assert (sample.images_per_second, sample.startup_seconds) == (50, 4.0)


def test_independent_processes_add_up_and_the_slowest_of_them_counts():
    sample = made(cell(strategy="independent"), 0, output([1.0]), output([2.0], first_step_at=1007.0))
    assert (sample.images_per_second, sample.startup_seconds) == (100, 7.0)
    assert sample.peak_memory_bytes_by_rank == (10, 10)


def test_the_energy_of_an_image_is_that_of_all_gpus():
    one, two = (Block(100, (1.0,), joules=joules) for joules in (30.0, 50.0))
    unknown = dataclasses.replace(two, joules=None)
    processes = [Measured((block,), (10,), 1004.0, None) for block in (one, two, unknown)]
    assert made(cell(strategy="independent"), 0, *processes[:2]).joules_per_image == 80 / 200
    assert made(cell(strategy="independent"), 0, *processes).joules_per_image is None


@pytest.mark.parametrize(("accuracies", "seconds"), [((0.8, 0.91, 0.95), 4.0), ((0.8, 0.89), None)])
def test_time_to_accuracy_is_that_of_the_first_epoch_with_it(accuracies, seconds):
    sample = made(cell("real-strong"), 0, output([1.0], accuracies=accuracies))
    assert sample.seconds_to_target == seconds


def test_failed_launches_stay_visible():
    good = made(cell(), 0, output([1.0]))
    bad = samples.make(cell(), 1, Outcome("timeout", "took longer", 0.0, 9.0, "log"), (), target=1, commands=[["true"]])
    statuses = [samples.summarise(of_cell).status for of_cell in ([good], [good, None], [good, bad], [bad])]
    assert statuses == ["ok", "pending", "partial", "failed"]
    assert samples.summarise([good, bad]).reason == "took longer"
    assert samples.summarise([bad, None]).images_per_second is None


def test_efficiency_is_the_ratio_within_a_round():
    rates = {
        cell(strategy="independent", ranks=1): [100, 110],
        cell(strategy="independent", ranks=2): [160, 170],
        cell(ranks=1): [80, 100],
        cell(): [120, None],
        cell(framework="tensorflow"): [60, 90],
    }
    outcomes = {
        of.id: [rate and made(of, number, output([100 / rate])) for number, rate in enumerate(of_cell)]
        for of, of_cell in rates.items()
    }
    found = efficiency(cell(), outcomes, set(outcomes))
    medians = {name: ratio.median for name, ratio in found.items()}
    expected = {"same_strategy_one_rank": 0.75, "single_process": 0.6, "independent": 0.75, "first_framework": 1}
    assert medians == pytest.approx(expected)
    assert efficiency(cell(framework="tensorflow"), outcomes, set(outcomes))["first_framework"].num == 1
    # A cell that is not comparable has no ratios and is no other cell's reference.
    assert efficiency(cell(), outcomes, set(outcomes) - {cell().id}) == {}
    assert "single_process" not in efficiency(cell(), outcomes, {cell().id, cell(ranks=1).id})


def test_a_ratio_pairs_blocks_and_drops_what_disturbed_some():
    """The machine halves its speed from block to block for both cells; each cell has one disturbed block of five."""
    moods = [1.0, 2.0, 1.0, 2.0, 1.0]
    blocks = {cell(): [1.0, 1.0, 1.0, 9.0, 1.0], cell(strategy="independent"): [0.5, 0.5, 5.0, 0.5, 0.5]}
    outcomes = {
        of.id: [made(of, 0, output(*([mood * own] for mood, own in zip(moods, seconds, strict=True))))]
        for of, seconds in blocks.items()
    }
    assert efficiency(cell(), outcomes, set(outcomes))["independent"].median == pytest.approx(0.5)
    # Dividing the medians would give 1, because they were taken at different speeds of the machine.
    assert [sample.images_per_second for [sample] in outcomes.values()] == [100, 100]


def test_how_well_shares_of_the_limit_are_known():
    """Shares of 5, 10 and 20 % give 10 %; the limit itself and a share measured only once do not count."""

    def share(half: float, strategy: str = "horovod", num: int = 5) -> CellResult:
        return result(cell(strategy=strategy), efficiency={"independent": estimated(0.5, 0.5 * half, num)})

    others = [share(0.9, "independent"), result(cell(strategy="ddp"))]
    once = share(0.0, "ddp", num=1)
    assert "known to +-10.0% here" in samples.resolution([share(0.05), share(0.2), share(0.1), *others, once])
    assert samples.resolution([*others, once]) == ""


def test_a_note_has_all_that_stands_against_a_cell():
    verdict = Verdict("failed", "its curve differs")
    of = result(cell(), status="partial", reason="it hung", comparable=False, gate=verdict)
    assert note(of) == "partial: it hung; not compared: its curve differs"
    assert note(dataclasses.replace(of, status="failed", images_per_second=None)) == "failed: it hung"
    assert note(dataclasses.replace(of, status="ok", comparable=True)) == ""
