"""Findings on learning rates in made-up records. Oracle: arithmetic, and the planted fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prove_records import ALONE, map_steps, names, run, with_more

from allstep.commands.prove.checks import findings, perhaps
from allstep.commands.prove.launching import Script
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    FOLLOWS_LOSSES,
    Loop,
    Step,
    Unseen,
)
from allstep.commands.prove.report import report
from allstep.commands.prove.runs import Runs


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.2, []), (0.1, ["learning-rate-not-scaled"]), (0.4, ["learning-rate-scaled-twice"]), (0.1414, [])],
)
def test_the_rate_follows_the_batch(rate, expected):
    """Oracle: lr * 2 for twice the batch (Goyal et al., 2017), or the square root."""
    assert names(run(rate=rate)) == expected


@pytest.mark.parametrize(
    ("alone", "together", "expected"),
    [
        ((0.1, 0.1, 0.1), ((0.2, 0.2, 0.2), (0.2, 0.2, 0.1)), ["learning-rate-differs"]),  # and so do weights
        ((0.1, 0.1, 0.1), ((0.1, 0.1, 0.15),) * 2, []),  # a warm-up that begins at the rate of one rank
        ((0.1, 0.1, 0.1), ((0.1,),) * 2, []),  # the same, of which one step is seen
        ((0.1, 0.08, 0.06), ((0.2, 0.12, 0.04),) * 2, []),  # at equal samples
        ((0.1, 0.08, 0.06), ((0.2, 0.16, 0.12),) * 2, []),  # at equal steps
        ((0.1, 0.08, 0.06), ((0.2, 0.04, 0.02),) * 2, ["schedule-too-fast"]),
        ((0.1, 0.02, 0.1), ((0.2, 0.04, 0.02),) * 2, []),  # a cycle
        ((0.1, 0.08, 0.06), ((0.2, 0.02, 0.1),) * 2, ["schedule-too-fast"]),  # beyond the end of a cosine
        ((0.05, 0.05, 0.06), ((0.1, 0.08, 0.06),) * 2, []),  # a rate below the schedule's lowest one rises
    ],
)
def test_rates_in_later_steps(alone, together, expected):
    """Oracle: the batch of two ranks is twice that of one."""
    one = map_steps(run(size=1), lambda _, step: {"learning_rates": (alone[step.number - 1],)})
    seen = [
        Rank(tuple(one for one in rank.records if not isinstance(one, Step) or one.number <= len(together[0])))
        for rank in run().ranks
    ]
    both = map_steps(
        replace(run(), ranks=tuple(seen)), lambda rank, step: {"learning_rates": (together[rank][step.number - 1],)}
    )
    if together[0] != together[1]:
        both = map_steps(both, lambda rank, step: {"weights": {"w": f"{rank * (step.number - 1)}"}})
    assert [finding.name for finding in findings(Runs(one, both))] == expected


@pytest.mark.parametrize(
    ("lengths", "together", "expected"),
    [
        ((30, 15), (0.2, 0.16, 0.12), 1),
        ((30, 30), (0.2, 0.16, 0.12), 0),
        ((30, 15), (0.2, 0.12, 0.04), 0),  # at equal samples
        ((30, 15), (0.2, 0.2, 0.2), 0),
    ],
)
def test_schedules_that_count_the_steps_of_one_rank(lengths, together, expected):
    """The schedule ends with the last epoch of one rank, and later than that of several."""
    runs = []
    for right, rates, length in zip((ALONE, run()), ((0.1, 0.08, 0.06), together), lengths, strict=True):
        fallen = map_steps(right, lambda _, step, rates=rates: {"learning_rates": (rates[step.number - 1],)})
        ranks = [
            Rank(tuple(replace(one, num_batches=length) if isinstance(one, Loop) else one for one in rank.records))
            for rank in fallen.ranks
        ]
        runs.append(replace(fallen, ranks=tuple(ranks)))
    assert findings(Runs(*runs)) == []
    assert len([one for one in perhaps(Runs(*runs), []) if "accelerator.prepare(scheduler)" in one]) == expected


@pytest.mark.parametrize(("unseen", "expected"), [([], ["schedule-too-fast"]), ([Unseen(FOLLOWS_LOSSES, "")], [])])
def test_rates_that_follow_losses_may_fall_at_other_times(unseen, expected):
    falling = map_steps(with_more(*unseen), lambda _, step: {"learning_rates": ((0.2, 0.04, 0.02)[step.number - 1],)})
    assert names(falling) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if loss > best:\n    for group in groups:\n        group['lr'] *= 0.1", False),
        ("bad = 0 if loss < best else bad + 1\nfactor = 0.1**bad\noptimizer.param_groups[0]['lr'] = factor", False),
        (
            "def lower():\n    opt.learning_rate.assign(rate)\nif logs['val_loss'] > self.best:\n    lower()",
            False,
        ),
        ("for group in groups:\n    group['lr'] = 0.1 ** (epoch // 30)\nbest = min(best, loss)", True),
        ("if loss > best:\n    state = {'lr': lr, 'loss': loss}\nlr = state['lr'] * step", True),
    ],
)
def test_rates_that_a_script_lowers_by_losses(text, expected, tmp_path):
    """A plateau by hand may fall at other times on several ranks; that a script compares losses tells nothing."""
    script = tmp_path / "script.py"
    script.write_text(text)
    falling = map_steps(run(), lambda _, step: {"learning_rates": ((0.2, 0.04, 0.02)[step.number - 1],)})
    runs = Runs(ALONE, falling, script)
    assert [finding.name for finding in findings(runs)] == ["schedule-too-fast"] * expected
    assert (FOLLOWS_LOSSES in report(Script(script, (), "torchrun", 3, 60), runs, [])) != expected
