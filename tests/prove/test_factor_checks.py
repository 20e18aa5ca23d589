"""Findings on the factor of gradients, and on losses, in made-up records. Oracle: arithmetic, and the planted fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prove_records import ALONE, GRADIENTS, map_steps, names, run

from allstep.commands.prove.checks import findings, perhaps
from allstep.commands.prove.checks.factors import first_ratio
from allstep.commands.prove.observer.values import projections
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    BACKWARD,
    Collective,
    Forward,
    Gradient,
    Step,
    Waiting,
)
from allstep.commands.prove.runs import Runs


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1, []), (2, ["gradients-summed"]), (0.5, ["gradients-averaged-twice"]), (0.37, [])],
)
def test_the_factor_of_the_mean(factor, expected):
    """A factor that is neither the number of ranks nor its inverse comes from a clipped norm or a loss scale."""
    assert names(run(factor)) == expected


@pytest.mark.parametrize(
    ("factor", "share", "expected"),
    [
        (2, 1, ["gradients-summed"]),
        (2, 1.4, ["gradients-summed"]),  # of half as many samples
        (2, 0.7, []),
        (2, 0.5, []),
        (0.5, 1, ["gradients-averaged-twice"]),
        (0.5, 1.4, []),
    ],
)
def test_sums_of_gradients_that_a_script_sets(factor, share, expected):
    """Ranks may set the sums of a share of the samples, of which losses tell nothing. Oracle: their lengths."""

    def change(rank: int, step: Step) -> dict[str, object]:
        [one] = step.gradients
        local = tuple(share * np.array(projections(GRADIENTS[0, step.number - 1])))
        return {"gradients": (replace(one, local=local, applied=tuple(factor * np.array(local)), is_set=True),)}

    assert names(map_steps(run(), change)) == expected


def test_a_second_average_is_between_backward_and_step():
    """An all-reduce of a logged loss comes after the step."""
    right = run(0.5)
    ranks = []
    for rank in right.ranks:
        records = list(rank.records)
        for index in [at for at, one in enumerate(records) if isinstance(one, Step)][::-1]:
            records[index + 1 : index + 1] = [Collective("all_reduce", "", (), "train.py:11")]
            records[index:index] = [
                Waiting(BACKWARD, ""),
                Collective("all_reduce", "", (), "train.py:8"),
                Waiting("", ""),
            ]
        ranks.append(Rank(tuple(records)))
    [found] = findings(Runs(ALONE, replace(right, ranks=tuple(ranks))))
    assert found.mend == "leave the second average out (the script's own all-reduces: train.py:8)"


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((0.66, 0.5, 0.4), []),  # each replica divides by the global batch; the first samples were harder
        ((1.4, 1.0, 0.9), ["gradients-summed"]),
        ((0.3, 0.25, 0.2), ["loss-scaled"]),
    ],
)
def test_the_losses_of_gradients_that_are_summed(losses, expected):
    """Oracle: each loss is 1 on one rank, and so 1/2 on each of two ranks that divide by the samples of both."""
    right = run(2)
    for_each = [iter(losses) for _ in right.ranks]
    ranks = [
        Rank(tuple(replace(one, loss=next(own)) if isinstance(one, Step) else one for one in rank.records))
        for rank, own in zip(right.ranks, for_each, strict=True)
    ]
    assert names(replace(right, ranks=tuple(ranks))) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({"w": "00"}, ["gradients-summed"]), ({"net/w": "00"}, ["gradients-summed"]), ({"w": "01"}, [])],
)
def test_losses_of_other_first_weights_tell_nothing_unless_they_are_near(weights, expected):
    """Oracle: each loss is 1 on one rank; 0.8 may be half of a larger one if both runs have drawn their weights.

    Keras may name the same weights otherwise under Horovod.
    """
    together = map_steps(run(2), lambda _, step: {"loss": 0.8, "weights": weights if step.number == 1 else {}})
    assert names(together) == expected


def test_what_adasum_adds_up_is_no_mean():
    """Neither the factor nor the learning rate is a fault: Horovod asks for no scaling with Adasum."""
    call = Collective("allreduce", "w", (50,), "train.py:8", "adasum")
    right = run(2, rate=0.1)
    assert names(right) == ["gradients-summed", "learning-rate-not-scaled"]
    assert names(replace(right, ranks=tuple(Rank((*rank.records[:-1], call)) for rank in right.ranks))) == []


@pytest.mark.parametrize(
    ("is_same_sample", "alone", "clip", "expected"),
    [
        (True, (1.0, 3.0), 1.0, []),
        (True, (2.0, 6.0), 1.0, []),  # the rate is too large
        (False, (1.0, 1.0), 1.0, ["loss-scaled"]),
        (True, (1.0, 1.0), 0.5, ["loss-scaled"]),
        (False, (1.0, 1.0), 0.5, ["loss-scaled"]),
        (False, (1.0, 0.9), 0.5, []),
    ],
)
def test_the_loss_of_a_small_batch_is_compared_with_that_on_the_same_samples(is_same_sample, alone, clip, expected):
    """Oracle: the losses of one rank over the samples of both ranks, which it sees in two steps.

    Where the script clips gradients, only the same samples tell, or ratios that are alike.
    """
    losses = iter((*alone, 1.0))

    def change(record: object) -> object:
        if isinstance(record, Step):
            return replace(record, loss=next(losses))
        if isinstance(record, Forward) and is_same_sample:
            return replace(record, rows=tuple(f"{record.step - 1} 0 {row}" for row in range(4)))
        return record

    one = replace(ALONE, ranks=(Rank(tuple(map(change, ALONE.ranks[0].records))),))

    def clipped(rank, step):
        [whole] = step.gradients
        applied = tuple(clip * one for one in whole.applied)
        return {"loss": 2.0, "gradients": (replace(whole, applied=applied, unclipped=whole.applied),)}

    assert [finding.name for finding in findings(Runs(one, map_steps(run(), clipped)))] == expected


@pytest.mark.parametrize(
    ("factors", "expected"),
    [((0.3, 0.5, 0.7), []), ((0.5, 0.3, 0.5), ["gradients-averaged-twice"]), ((0.0, 0.0, 0.0), [])],
)
def test_factors_of_a_norm_that_the_script_clips(factors, expected):
    def change(rank, step):
        [whole] = step.gradients
        return {"gradients": (replace(whole, applied=tuple(factors[step.number - 1] * one for one in whole.applied)),)}

    assert names(map_steps(run(), change)) == expected


def test_the_factor_of_weights_beside_clipped_ones():
    def change(rank, step):
        [whole] = step.gradients
        values = GRADIENTS[:, step.number - 1].mean(0).clip(-0.1, 0.1)
        return {"gradients": (whole, Gradient("clipped", whole.local, projections(values)))}

    assert names(map_steps(run(2), change)) == ["gradients-summed"]
    assert names(map_steps(run(1), change)) == []


@pytest.mark.parametrize(("factor", "expected"), [(1, []), (2, ["gradients-summed"])])
def test_a_sum_that_clipping_makes_as_long_as_a_mean(factor, expected):
    def change(rank, step):
        [whole] = step.gradients
        return {"gradients": (replace(whole, applied=(0.1 / step.number,) * 4, unclipped=whole.applied),)}

    assert names(map_steps(run(factor), change)) == expected


@pytest.mark.parametrize(("queues", "expected"), [(("a", "a"), ["loss-scaled"]), (("a", "b"), [])])
def test_losses_of_models_with_other_constants(queues, expected):
    """The loss of a model with a queue of random keys tells nothing about that of another."""
    halved = map_steps(run(), lambda _, step: {"loss": 0.5})
    ranks = []
    for rank, queue in zip(halved.ranks, queues, strict=True):
        changing = iter((queue, f"{queue} 1", f"{queue} 2"))
        records = [
            replace(one, buffers={"queue": next(changing)}) if isinstance(one, Forward) else one for one in rank.records
        ]
        ranks.append(Rank(tuple(records)))
    assert names(replace(halved, ranks=tuple(ranks))) == expected


@pytest.mark.parametrize("gathers", ["in the model", "after it", "no"])
def test_losses_that_compare_samples_of_all_ranks(gathers):
    """A contrastive loss grows with the number of ranks, whose samples it compares with each other."""
    records = []
    for record in (one for rank in run().ranks for one in rank.records):
        if isinstance(record, Forward):
            records.append(replace(record, collectives=("all_gather",) * (gathers == "in the model")))
            records += [Collective("all_gather", "", (), "train.py:8")] * (gathers == "after it")
            record = Waiting(BACKWARD, "train.py:8")
        records.append(replace(record, loss=2.0) if isinstance(record, Step) else record)
    half = len(records) // 2
    together = replace(run(), ranks=(Rank(tuple(records[:half])), Rank(tuple(records[half:]))))
    assert names(together) == ["loss-scaled"] * (gathers == "no")


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1, ("", "")),
        (0.5, ("loss-scaled", "gradients-averaged-twice")),
        (2, ("loss-scaled", "gradients-summed")),
        (1 + np.arange(50), ("", "")),  # as with labels of other samples
    ],
)
@pytest.mark.parametrize("counts_tokens", [False, True])
def test_gradients_on_the_samples_of_one_rank(ratio, expected, counts_tokens):
    """A loss compares samples of all ranks, or the script divides by tokens. Oracle: the mean is that of one rank."""
    sides = []
    for side, together in ((run(size=1, rate=0.1), False), (run(rate=0.1), True)):
        ranks = []
        for rank in side.ranks:
            records = []
            for one in rank.records:
                gathers = ("all_gather",) * (together and not counts_tokens)
                if isinstance(one, Forward):
                    rows = ("a", "b")[rank.number : rank.number + 1] if together else ("a", "b")
                    one = replace(one, rows=rows if one.step == 1 else one.rows, collectives=gathers)
                elif isinstance(one, Step):
                    number = one.number - 1
                    mean = GRADIENTS[:2, number].mean(0) * ((0.3, 0.5, 0.7)[number] if counts_tokens else 1)
                    local = projections(GRADIENTS[rank.number, number]) if together else None
                    gradient = Gradient("w", local, projections(mean if together else mean / ratio))
                    one = replace(one, gradients=(gradient,))
                records.append(one)
            ranks.append(Rank(tuple(records)))
        sides.append(replace(side, ranks=tuple(ranks)))
    runs = Runs(*sides)
    assert [one.name for one in findings(runs)] == [*filter(None, [expected[counts_tokens]])]
    lines = [one for one in perhaps(runs, []) if one.startswith("a loss compares samples of all ranks")]
    assert len(lines) == (np.ndim(ratio) > 0 and not counts_tokens)


def test_the_loss_of_a_single_step_tells_nothing():
    ranks = [Rank(rank.records[:5]) for rank in map_steps(run(), lambda _, step: {"loss": 2.0}).ranks]
    assert names(replace(run(), ranks=tuple(ranks))) == []


def test_the_first_ratio_of_losses_is_told_from_their_trend_and_from_outliers():
    ratios = [0.5 * 1.02 ** (-1) ** step for step in range(20)]
    assert first_ratio([*ratios[:-1], 1e-4]) == pytest.approx(0.5, rel=0.1)
    assert first_ratio([2 * one * 0.95**step for step, one in enumerate(ratios)]) == pytest.approx(1, rel=0.1)
    assert first_ratio([-0.5, 1.0, 2.0]) == 1.0
