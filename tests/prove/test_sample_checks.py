"""Findings on samples and loops in made-up records. Oracle: arithmetic, and the fault that the records contain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prove_records import STEP, map_steps, names, run

from allstep.commands.prove.checks import findings, perhaps
from allstep.commands.prove.observer import values
from allstep.commands.prove.observer.progress import may_end_early
from allstep.commands.prove.observer.pytorch_data import held
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    Batch,
    Forward,
    Held,
    Loop,
    LoopEnd,
    Resumed,
    Sampler,
    Waiting,
    World,
    Yielded,
)
from allstep.commands.prove.runs import Run, Runs

_WHOLE = Sampler("RandomSampler", True, reads_all=True)
_SHARES = Sampler("DistributedSampler", True, 2, 0, 0, 0)
_OWN = Sampler("Weighted", True)
_SAME, _OTHER = Held(("00", "01", "02")), Held(("03", "04", "05"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "finding"),  # all 10,000 samples on every rank, in another order
        ({"num_batches": 5_000}, "finding"),  # the script divides the batch by the ranks
        ({"data": (_SAME, _OTHER)}, None),  # each rank has its own data
        ({"data": (None, None)}, "perhaps"),  # unknown
        ({"order": 0}, None),  # the same batches on all ranks, each of which takes its share of them
        ({"may_end_early": True}, "perhaps"),  # epochs divided by the ranks, as in Horovod's own examples
        ({"num_samples": 5_000, "num_batches": 1_250}, "finding"),  # a single rank has twice as many
        ({"num_samples": 5_000, "num_batches": 1_250, "data": (_SAME, _OTHER)}, None),
        ({"sampler": Sampler("Weighted", True)}, None),  # a sampler of the user
        ({"sampler": _SHARES}, None),
        ({"order": 10, "num_samples": 22, "sampler": _OWN}, None),  # two samples fill up the last batch
        ({"order": 4, "num_samples": 16, "sampler": _OWN}, "perhaps"),  # as many as a step has are drawn twice
        ({"order": 6, "num_samples": 12, "sampler": _OWN}, None),  # an endless one, in its second epoch
        # Classes are numbered in another order on each rank.
        ({"sampler": _SHARES, "data": (_SAME, _OTHER)}, "perhaps"),
    ],
)
def test_ranks_that_read_the_whole_data_set(change, expected):
    """Oracle: the samples that torch's samplers claim to draw; 12 of 10,000 samples hardly show it."""
    alone = _loaded(run(size=1, rate=0.1))
    together = _loaded(run(), **change)
    runs = Runs(alone, together)
    found = findings(runs)
    assert [finding.name for finding in found] == ["samples-overlap"] * (expected == "finding")
    assert len(perhaps(runs, found)) == (expected == "perhaps")


@pytest.mark.parametrize(
    ("makers", "expected"),
    [
        ((), "DataLoader(data, sampler=DistributedSampler(data, num_replicas=dist.get_world_size(), "),
        (("accelerate.accelerator", "accelerate.state"), "accelerator.prepare(loader)"),
        (("lightning.fabric.fabric", "lightning.fabric.strategies.ddp"), "fabric.setup_dataloaders(loader)"),
        (("pytorch_lightning.trainer", "lightning_fabric.utilities"), "Trainer(use_distributed_sampler=True)"),
        (("transformers.training_args", "accelerate.state"), "leave get_train_dataloader to Trainer"),
    ],
)
def test_advice_in_words_of_the_library_that_makes_the_process_group(makers, expected):
    together = _loaded(run())
    world = World("torch.distributed", 0, 2, "", ("__main__", *makers, "torch.distributed"))
    first = tuple(world if isinstance(one, World) else one for one in together.ranks[0].records)
    [found] = findings(Runs(_loaded(run(size=1, rate=0.1)), replace(together, ranks=(Rank(first), together.ranks[1]))))
    assert expected in found.mend and ("DistributedSampler" in found.mend) == (not makers)


def test_loaders_that_draw_alike_for_models_whose_calls_show_no_samples():
    """Each rank may take its share of a batch in between."""
    right = _loaded(run(), order=0)
    hidden = [
        [replace(one, rows=()) if isinstance(one, Forward) else one for one in rank.records] for rank in right.ranks
    ]
    runs = Runs(_loaded(run(size=1, rate=0.1)), replace(right, ranks=tuple(Rank(tuple(own)) for own in hidden)))
    assert findings(runs) == []
    [text] = perhaps(runs, [])
    assert "draw the same samples" in text


def test_a_loader_that_goes_on_from_epoch_to_epoch():
    endless = _loaded(run(), order=8, num_samples=16, num_batches=2, sampler=_SHARES)
    assert findings(Runs(_loaded(run(size=1, rate=0.1)), endless)) == []


def _loaded(right: Run, *, data: tuple = (_SAME, _SAME), order: int = 100, **loop: object) -> Run:
    """Return the run with ranks that read by loaders of torch; `order` is the distance of their indices."""
    ranks = []
    for rank, own in zip(right.ranks, data, strict=False):
        read = {"num_samples": 10_000, "num_batches": 2_500, "sampler": _WHOLE, **loop}
        begins = [order * rank.number + 4 * step for step in range(3)]
        batches = [Batch(1, tuple(range(begin, begin + 4))) for begin in begins]
        records = [replace(one, **read) if isinstance(one, Loop) else one for one in rank.records[:-1]]
        ranks.append(Rank((*records, *batches, *([own] if own else []), rank.records[-1])))
    return replace(right, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for batch in loader:\n    step(batch)", False),
        ("for i, batch in enumerate(loader):\n    if args.dry_run:\n        break", False),
        ("for i, batch in enumerate(loader):\n    if i == 10 // size:\n        break", True),
        ("for _, batch in zip(range(10), loader):\n    step(batch)", True),
        ("trainer.fit(loader)", True),
        ("L.Trainer(max_epochs=3).fit(loader)", False),
        ("L.Trainer(max_epochs=3, limit_train_batches=10).fit(loader)", True),
        ("Trainer(**options).fit(loader)", True),
    ],
)
def test_loops_that_may_end_early(body, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(body)
    assert may_end_early(str(script), 1) == expected


def test_what_a_data_set_holds(monkeypatch):
    """Random augmentation leaves the data the same; purely random samples and streams have no identity."""
    monkeypatch.setattr(values, "_HELD_SECONDS", 600.0)  # a busy host has time for fewer samples

    class Random:
        def __init__(self, scale):
            self.scale = scale

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            return {"x": [torch.rand(3) + self.scale * index], "y": 0}

    assert held(Random(1)) == held(Random(1)) != held(Random(2))
    assert held(Random(1)) is not None
    assert held(Random(0)) is held(iter(())) is None


@pytest.mark.parametrize(
    ("shares", "num_samples", "expected"),
    [
        ((range(0, 40), range(40, 80)), 80, []),
        ((range(0, 40), range(30, 70)), 80, ["samples-overlap"]),
        ((range(0, 30), range(50, 80)), 80, ["samples-left-out"]),
    ],
)
def test_ranks_with_data_sets_of_their_own(shares, num_samples, expected):
    """Indices are equal on all ranks; the samples tell."""
    held = tuple(Held(tuple(f"{index:02}" for index in share)) for share in shares)
    together = _loaded(run(), data=held, order=0, num_samples=len(shares[0]), num_batches=10)
    alone = _loaded(run(size=1, rate=0.1), num_samples=num_samples, num_batches=20)
    assert [finding.name for finding in findings(Runs(alone, together))] == expected


def test_a_stream_that_each_worker_reads():
    loop = Loop(1, "train.py:5", None, sampler=Sampler("_Infinite", False), num_workers=2)
    right = run()
    batches = [Yielded(1, (str(number // 2), f"x{number // 2}")) for number in range(7)]
    ranks = [
        Rank((*(loop if isinstance(one, Loop) else one for one in rank.records[:-1]), *batches, rank.records[-1]))
        for rank in right.ranks
    ]
    assert names(replace(right, ranks=tuple(ranks))) == ["samples-doubled"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [([], ["uneven-batches"]), ([Waiting("hvd.join", "train.py:9"), Resumed()], [])],
)
def test_loops_of_different_lengths(more, expected):
    right = run()
    ranks = []
    for rank in right.ranks:
        loop = Loop(1, "train.py:5", 25 + 7 * rank.number)
        records = [loop if isinstance(one, Loop) else one for one in rank.records[:-1]]
        ranks.append(Rank((*records, LoopEnd(1, 3, True), *more, rank.records[-1])))
    assert names(replace(right, ranks=tuple(ranks))) == expected


def test_rank_0_alone_validates_between_epochs_of_other_lengths():
    """A curriculum. Oracle: epochs are equally long on both ranks."""
    ranks = []
    for rank in run().ranks:
        call = next(one for one in rank.records if isinstance(one, Forward))
        more = [Loop(2, "train.py:15", 4)] * (rank.number == 0)
        more += [Loop(3, "train.py:5", 1), replace(call, loop=3), Loop(4, "train.py:5", 2), replace(call, loop=4)]
        ranks.append(Rank((*rank.records[:-1], *more, rank.records[-1])))
    assert names(replace(run(), ranks=tuple(ranks))) == []


@pytest.mark.parametrize(("may_end_early", "expected"), [(True, ["same-order"]), (False, [])])
def test_the_order_of_an_epoch_that_another_line_starts(may_end_early, expected):
    """Scripts start a loader before a loop, and anew after StopIteration in it; two `for` may be phases alike."""
    ranks = []
    for rank in run().ranks:
        own = {"sampler": _SHARES, "data": 1, "may_end_early": may_end_early}
        records = [replace(one, **own) if isinstance(one, Loop) else one for one in rank.records[:-1]]
        more = [Batch(1, (3, 1, 2)), Loop(2, "train.py:6", 3, **own), Batch(2, (3, 1, 2)), replace(STEP, loop=2)]
        ranks.append(Rank((*records, *more, rank.records[-1])))
    assert [one for one in names(replace(run(), ranks=tuple(ranks))) if one == "same-order"] == expected


@pytest.mark.parametrize(("num_steps", "expected"), [(2, ["same-order"]), (1, [])])
def test_the_order_of_a_second_loader(num_steps, expected):
    """Steps belong to the loader that has yielded last, beside which another may train; validation is between steps."""
    ranks = []
    for rank in run().ranks:
        records = list(rank.records[:-1])
        for number in (2, 3):
            records += [Loop(number, "train.py:6", 3, sampler=_SHARES, data=2), Batch(number, (3, 1, 2))]
            for step in range(num_steps if number == 2 else 1):  # later loops are cut
                records += [Yielded(number, (str(step),)), replace(STEP, number=2 * number + step)]
        ranks.append(Rank((*records, rank.records[-1])))
    assert [one for one in names(replace(run(), ranks=tuple(ranks))) if one == "same-order"] == expected


@pytest.mark.parametrize(
    ("indices", "data", "expected"),
    [((3, 1, 2), 1, ["same-order"]), ((2, 3, 1), 1, []), ((3, 1, 2), 2, [])],
)
def test_the_order_of_an_epoch_in_a_second_phase(indices, data, expected):
    """Each phase of a fine-tuning has an optimizer of its own; a loop over other data may have the same indices."""
    ranks = []
    for rank in run().ranks:
        records = [replace(one, sampler=_OWN, data=1) if isinstance(one, Loop) else one for one in rank.records[:-1]]
        more = [Batch(1, (3, 1, 2)), Loop(2, "train.py:5", 3, sampler=_OWN, data=data), Batch(2, indices)]
        step = replace(STEP, optimizer=2, loop=2, kind="Adam", weights={})
        ranks.append(Rank((*records, *more, step, rank.records[-1])))
    assert [one for one in names(replace(run(), ranks=tuple(ranks))) if one == "same-order"] == expected


@pytest.mark.parametrize(("losses", "found", "num_perhaps"), [((0.6, 0.6), ["same-samples"], 0), ((0.6, 0.7), [], 1)])
def test_a_whole_batch_of_which_each_rank_may_take_a_share(losses, found, num_perhaps):
    """All nodes of a graph, with losses of some nodes on each rank."""
    together = map_steps(run(), lambda rank, step: {"loss": losses[rank] / step.number})
    ranks = [
        Rank(tuple(replace(one, rows=("a", "b", "c")) if isinstance(one, Forward) else one for one in rank.records))
        for rank in together.ranks
    ]
    runs = Runs(None, replace(together, ranks=tuple(ranks)))
    assert [finding.name for finding in findings(runs)] == found
    assert len(perhaps(runs, findings(runs))) == num_perhaps


@pytest.mark.parametrize(
    ("is_wrapped", "expected"), [(False, ["same-samples"]), (True, ["learning-rate-not-scaled", "same-samples"])]
)
def test_rates_of_ranks_whose_equal_samples_hide_that_they_step_apart(is_wrapped, expected):
    """Averages of weights (local SGD) ask for no other rate, and equal weights do not show them."""
    apart = map_steps(run(), lambda _rank, _step: {"learning_rates": (0.1,), "is_wrapped": is_wrapped})
    first, other = (rank.records for rank in apart.ranks)
    assert sorted(names(replace(apart, ranks=(Rank(first), Rank((*other[:2], *first[2:])))))) == expected


@pytest.mark.parametrize(
    ("num_loaded", "begins", "data", "expected"),
    [
        (4, (0, 0), (), ["same-samples"]),
        (4, (0, 0), (_SAME, _SAME), ["same-samples"]),
        (4, (0, 0), (_SAME, _OTHER), []),  # such as nodes of a graph, which are loaded with common neighbours
        (4, (0, 100), (), []),  # each rank draws its share
        (8, (0, 0), (), []),  # each rank trains on half of every batch
    ],
)
def test_samples_that_ranks_change_by_noise_of_their_own(num_loaded, begins, data, expected):
    """Oracle: what loaders yield, and how many samples a model gets for each; one rank trains on all that it loads."""
    sampler = Sampler("DistributedSampler", True, 1, 0, 0, 0)

    def with_loads(right: Run, size: int, begins: tuple[int, ...]) -> Run:
        ranks = []
        for rank, begin in zip(right.ranks, begins, strict=False):
            records, left_out = [], range(4, 4 + size * (len(right.ranks) - 1))  # by several ranks, at the end
            for one in [*rank.records, *(Forward(step, 1, True, (), None, {}, None, "") for step in left_out)]:
                if isinstance(one, Forward):
                    indices = tuple(range(begin + size * (one.step - 1), begin + size * one.step))
                    records += [Batch(1, indices), Yielded(1, tuple(map(str, indices)))]
                if not isinstance(one, Forward) or one.rows:
                    records.append(replace(one, sampler=sampler) if isinstance(one, Loop) else one)
            ranks.append(Rank((*records, *data[len(ranks) : len(ranks) + 1])))
        return replace(right, ranks=tuple(ranks))

    alone, together = with_loads(run(size=1, rate=0.1), 4, (0,)), with_loads(run(), num_loaded, begins)
    assert [finding.name for finding in findings(Runs(alone, together))] == expected
    sampler = Sampler("RepeatAugSampler", True)  # which may mean it
    together = with_loads(run(), num_loaded, begins)
    assert findings(Runs(alone, together)) == []
    assert len(perhaps(Runs(alone, together), [])) == len(expected)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [((1, 20, 20), [2, 3]), ((20, 1), [1, 2]), ((1, 1), [1, 2]), ((1, None), [2])],
)
def test_single_steps_that_build_a_model_are_no_epochs(lengths, expected):
    """Horovod's elastic Keras example begins with such a fit."""
    loops = [Loop(number, "train.py:5", length) for number, length in enumerate(lengths, 1)]
    rank = Rank((*loops, *(replace(STEP, number=loop.number, loop=loop.number) for loop in loops)))
    assert [loop.number for loop in rank.training_loops] == expected


_STREAM = Sampler("_InfiniteConstantSampler", False)


@pytest.mark.parametrize(
    ("is_cut", "sampler", "num_epochs", "expected"),
    [
        (False, None, 4, ["samples-overlap"]),
        (False, None, 2, []),  # epochs are divided by the ranks
        (True, None, 4, []),
        (False, _STREAM, 4, []),  # a stream as long as on one rank
    ],
)
def test_shares_of_fit_that_overlap_in_a_whole_epoch(is_cut, sampler, num_epochs, expected):
    """Oracle: samples of both ranks, of which each rank has every one once, in an epoch half as long as on one rank."""
    ranks = []
    for rank in run().ranks:
        records = [
            replace(one, rows=tuple(f"{(one.step + rank.number) % 4} {row}" for row in range(4)))
            if isinstance(one, Forward)
            else one
            for one in rank.records[:-1]
        ]
        own = {"sampler": sampler, "num_epochs": num_epochs}
        records = [replace(one, **own) if isinstance(one, Loop) else one for one in records]
        ranks.append(Rank((*records, LoopEnd(1, 3, is_cut), rank.records[-1])))
    alone = run(size=1, rate=0.1)
    longer = {"num_batches": 6, "num_epochs": 4}
    records = [replace(one, **longer) if isinstance(one, Loop) else one for one in alone.ranks[0].records]
    runs = Runs(replace(alone, ranks=(Rank(tuple(records)),)), replace(run(), ranks=tuple(ranks)))
    found = findings(runs)
    assert [finding.name for finding in found] == expected
    assert len(perhaps(runs, found)) == (not expected)


@pytest.mark.parametrize("draws", [(1, 0), (0, 1)])
def test_samplers_with_other_seeds_or_epochs(draws):
    """One rank resumes at another epoch, or has another seed."""
    ranks = []
    for rank in _loaded(run(), order=4, may_end_early=False).ranks:
        drawn = [rank.number * one for one in draws]
        sampler = Sampler("DistributedSampler", True, 2, rank.number, *drawn)
        records = [replace(one, sampler=sampler) if isinstance(one, Loop) else one for one in rank.records]
        ranks.append(Rank(tuple(records)))
    [finding] = findings(Runs(_loaded(run(size=1, rate=0.1)), replace(run(), ranks=tuple(ranks))))
    assert finding.name == "samples-overlap"
    assert finding.mend.endswith(f"the same seed and epoch; received (0, 0), {draws}")
