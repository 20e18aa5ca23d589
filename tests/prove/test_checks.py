"""Findings in made-up records, without a script. Oracle: arithmetic, and the fault that the records contain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prove_records import ALONE, GRADIENTS, map_steps, names, run, with_more

from allstep.commands.prove.checks import findings, perhaps
from allstep.commands.prove.launching import failure_of
from allstep.commands.prove.observer.observer import headline
from allstep.commands.prove.observer.values import projections, stride
from allstep.commands.prove.records import (
    Collective,
    Ended,
    Forward,
    Gradient,
    HostCopy,
    Loop,
    Resumed,
    Sent,
    Started,
    Step,
    Waiting,
    World,
    Wrapped,
    Write,
    Yielded,
)
from allstep.commands.prove.runs import Rank, Run, Runs

_GRAPH = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
  File "script.py", line 14, in <module>
{}
\t [[{{{{node PyFunc}}}}]] [Op:__inference_g_23]"""


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1, []), (2, ["gradients-summed"]), (0.5, ["gradients-averaged-twice"]), (0.37, [])],
)
def test_the_factor_of_the_mean(factor, expected):
    """A factor that is neither the number of ranks nor its inverse comes from a clipped norm or a loss scale."""
    assert names(run(factor)) == expected


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


def test_what_adasum_adds_up_is_no_mean():
    """Neither the factor nor the learning rate is a fault: Horovod asks for no scaling with Adasum."""
    call = Collective("allreduce", "w", (50,), "train.py:8", "adasum")
    right = run(2, rate=0.1)
    assert names(right) == ["gradients-summed", "learning-rate-not-scaled"]
    assert names(replace(right, ranks=tuple(Rank((*rank.records[:-1], call)) for rank in right.ranks))) == []


@pytest.mark.parametrize(
    ("is_wrapped", "expected"), [(True, "gradients-partly-averaged"), (False, "gradients-not-averaged")]
)
def test_some_averages_that_come_in_time(is_wrapped, expected):
    """If the step does not wait for Horovod, the number of averages in time tells nothing about the script."""
    wrapper = Wrapped("hvd.DistributedOptimizer", "train.py:3")

    def with_a_late_average(record: object) -> object:
        if not isinstance(record, Step):
            return record
        [in_time] = record.gradients
        late = Gradient("late", in_time.local, in_time.local)
        return replace(record, gradients=(in_time, late), is_wrapped=is_wrapped, wrapper="train.py:3")

    right = run()
    ranks = [Rank((wrapper, *map(with_a_late_average, rank.records))) for rank in right.ranks]
    assert names(replace(right, ranks=tuple(ranks))) == [expected]


@pytest.mark.parametrize(("is_same_sample", "expected"), [(True, []), (False, ["loss-scaled"])])
def test_the_loss_of_a_small_batch_is_compared_with_that_on_the_same_samples(is_same_sample, expected):
    """Oracle: the mean of the losses of one rank over the samples of both ranks, which it sees in two steps."""
    losses = iter((1.0, 3.0 if is_same_sample else 1.0, 1.0))

    def change(record: object) -> object:
        if isinstance(record, Step):
            return replace(record, loss=next(losses))
        if isinstance(record, Forward) and is_same_sample:
            return replace(record, rows=tuple(f"{record.step - 1} 0 {row}" for row in range(4)))
        return record

    alone = replace(ALONE, ranks=(Rank(tuple(map(change, ALONE.ranks[0].records))),))
    together = map_steps(run(), lambda rank, step: {"loss": 2.0})
    assert [finding.name for finding in findings(Runs(alone, together))] == expected


def test_the_factor_of_weights_beside_clipped_ones():
    def change(rank, step):
        [whole] = step.gradients
        values = GRADIENTS[:, step.number - 1].mean(0).clip(-0.1, 0.1)
        return {"gradients": (whole, Gradient("clipped", whole.local, projections(values)))}

    assert names(map_steps(run(2), change)) == ["gradients-summed"]
    assert names(map_steps(run(1), change)) == []


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ([], []),
        ([(1, 2)], ["steps-skipped"]),
        ([(0, 2), (1, 2)], []),  # all ranks skip it
        ([(0, 1), (1, 2), (1, 3)], []),  # each rank decides how many batches it accumulates
    ],
)
def test_a_rank_that_skips_a_step(extra, expected):
    """Oracle: the batches that ranks read before each step."""
    ranks = []
    for rank in run().ranks:
        records = []
        for record in rank.records:
            if isinstance(record, Forward):
                records += [Yielded(1, record.rows)] * (1 + ((rank.number, record.step) in extra))
            records.append(record)
        ranks.append(Rank(tuple(records)))
    assert names(replace(run(), ranks=tuple(ranks))) == expected


@pytest.mark.parametrize("by_library", [False, True])
def test_random_numbers_that_are_the_same_on_all_ranks(by_library):
    """A library that seeds all ranks alike may be meant to, as may the same augmentation."""
    right = run()
    ranks = []
    for rank in right.ranks:
        draws = {"random_state": "00", "by_library": by_library}
        records = [replace(one, **draws) if isinstance(one, Forward) else one for one in rank.records[:-1]]
        batches = [Yielded(1, (), (f"{rank.number}", "same", "")) for _ in range(2)]
        ranks.append(Rank((*records, *batches, rank.records[-1])))
    runs = Runs(ALONE, replace(right, ranks=tuple(ranks)))
    found = findings(runs)
    assert [finding.name for finding in found] == ["dropout-same"] * (not by_library)
    assert len(perhaps(runs, found)) == 1 + by_library


@pytest.mark.parametrize("status", [None, 1])
def test_an_error_of_a_rank_is_the_cause_before_its_launcher_has_ended(status):
    [first, second] = run().ranks
    failed = Rank((*second.records[:-1], Ended("RuntimeError: no data", "")))
    failed_too = Rank((*first.records[:-1], Ended("RuntimeError: no data", "")))
    assert failure_of(Run(2, (failed_too, failed), {}), status, "no line of it") == "RuntimeError: no data"


def test_a_rank_that_needs_one_that_was_seen_enough_has_no_fault():
    """A rank stopped after enough steps may break the other's collective; a rank that fails itself has a fault."""
    [first, second] = run().ranks
    seen = Rank((*first.records[:-1], Ended("steps", "")))
    failed = Rank((*second.records[:-2], Ended("RuntimeError: the connection is closed", "")))
    assert failure_of(Run(2, (seen, failed), {}), 1, "") == ""
    assert names(Run(2, (seen, failed), {})) == []
    early = Rank((*second.records[:4], Ended("RuntimeError: no data", "")))
    assert failure_of(Run(2, (seen, early), {}), 1, "") == "RuntimeError: no data"
    assert "collective-left-out" in names(Run(2, (first, failed), {}))


def test_directions_are_the_same_for_all_and_linear():
    one, other = GRADIENTS[0, 0], GRADIENTS[1, 0]
    both = np.add(projections(one), projections(other))
    assert np.allclose(both, projections(one + other))
    assert projections(np.array([1.0, np.inf])) is None


@pytest.mark.parametrize("num_values", [1, 4096, 4097, 10**6])
def test_large_tensors_are_looked_at_in_places(num_values):
    assert len(range(0, num_values, stride(num_values))) <= 4096


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.2, []), (0.1, ["learning-rate-not-scaled"]), (0.4, ["learning-rate-scaled-twice"]), (0.1414, [])],
)
def test_the_rate_follows_the_batch(rate, expected):
    """Oracle: lr * 2 for twice the batch (Goyal et al., 2017), or the square root."""
    assert names(run(rate=rate)) == expected


def test_ranks_that_share_a_gpu():
    assert names(run(device="GPU-1")) == ["gpu-shared"]


def test_a_copy_from_the_gpu_in_every_step():
    copies = [HostCopy(step, "train.py:8") for step in range(3)]
    assert names(with_more(*copies)) == ["host-copy-each-step"]
    assert names(with_more(*copies[:2])) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no data here\nin any folder", "no data here"),
        ("", ""),
        (_GRAPH.format("\nThe input might not be valid.\n"), "The input might not be valid."),
        (
            _GRAPH.format("\nValueError: no data\nTraceback:\n  File 'a'\n\nValueError: no data\n\n"),
            "ValueError: no data",
        ),
        (
            "in user code:\n\n    File 'a', line 5, in f  *\n        y()\n\n    TypeError: not callable\n",
            "TypeError: not callable",
        ),
        ("in user code:\n\n    File 'a', line 5, in f  *\n        y()\n\n    Missing: no data\n", "Missing: no data"),
    ],
)
def test_the_cause_of_an_error(text, expected):
    """Oracle: TensorFlow's messages of a Cholesky decomposition and of functions that fail in a graph or in tracing."""
    assert headline(text) == expected


def test_a_file_that_all_ranks_write():
    assert names(with_more(Write("/model.pt", "train.py:20"))) == ["every-rank-writes"]


@pytest.mark.parametrize(
    ("reason", "expected"), [("script", ["validation-of-one-rank"]), ("RuntimeError: no memory", [])]
)
def test_a_validation_that_is_not_reduced(reason, expected):
    """A rank that fails before it could combine the results does not show whether it would."""
    right = run()
    ranks = []
    for rank in right.ranks:
        evaluation = Forward(4, 2, False, (f"{rank.number}",), None, {}, None, "train.py:20")
        ranks.append(Rank((*rank.records[:-1], evaluation, Ended(reason, ""))))
    assert names(replace(right, ranks=tuple(ranks))) == expected


def test_a_model_that_is_called_before_the_broadcast_is_not_evaluated():
    made = Forward(1, 0, False, ("zeros",), None, {}, None, "train.py:4")
    right = run()
    ranks = [Rank((made, Collective("broadcast", "", (1,), "train.py:5"), *rank.records)) for rank in right.ranks]
    assert names(replace(right, ranks=tuple(ranks))) == []


def test_replicas_that_do_not_train():
    right = run()
    idle = Rank((Started(1, 0), World("tf.distribute", 1, 2, ""), Ended("script", "")))
    first = Rank((*right.ranks[0].records[:1], World("tf.distribute", 0, 2, ""), *right.ranks[0].records[2:]))
    assert names(replace(right, ranks=(first, idle))) == ["replicas-idle"]


def test_ranks_that_wait_at_different_places():
    right = run()
    waits = [Waiting("all_reduce", "train.py:30"), Waiting("barrier", "train.py:40")]
    calls = [Collective("all_reduce", "", (1,), "train.py:30"), Resumed()]
    ranks = [Rank((*rank.records[:-1], call, wait)) for rank, call, wait in zip(right.ranks, calls, waits, strict=True)]
    [finding] = findings(Runs(ALONE, replace(right, ranks=tuple(ranks), stacks={0: "", 1: ""})))
    assert finding.name == "collective-left-out"
    assert "train.py:30" in finding.evidence
    assert "train.py:40" in finding.evidence


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (("00", "00", "00"), []),
        (("00", "00", "0r"), ["weights-part"]),  # one rank has loaded others
        (("00", "0r", "00"), []),  # an average of weights (local SGD)
    ],
)
def test_weights_in_later_steps(weights, expected):
    def change(rank, step):
        return {"weights": {"w": weights[step.number - 1].replace("r", str(rank))}}

    assert names(map_steps(run(), change)) == expected


@pytest.mark.parametrize(
    ("alone", "together", "expected"),
    [
        ((0.1, 0.1, 0.1), ((0.2, 0.2, 0.2), (0.2, 0.2, 0.1)), ["learning-rate-differs"]),  # and so do weights
        ((0.1, 0.1, 0.1), ((0.1, 0.1, 0.15),) * 2, []),  # a warm-up that begins at the rate of one rank
        ((0.1, 0.08, 0.06), ((0.2, 0.12, 0.04),) * 2, []),  # at equal samples
        ((0.1, 0.08, 0.06), ((0.2, 0.16, 0.12),) * 2, []),  # at equal steps
        ((0.1, 0.08, 0.06), ((0.2, 0.04, 0.02),) * 2, ["schedule-too-fast"]),
    ],
)
def test_rates_in_later_steps(alone, together, expected):
    """Oracle: the batch of two ranks is twice that of one."""
    one = map_steps(run(size=1), lambda _, step: {"learning_rates": (alone[step.number - 1],)})
    both = map_steps(run(), lambda rank, step: {"learning_rates": (together[rank][step.number - 1],)})
    if together[0] != together[1]:
        both = map_steps(both, lambda rank, step: {"weights": {"w": f"{rank * (step.number - 1)}"}})
    assert [finding.name for finding in findings(Runs(one, both))] == expected


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        (lambda rank, gradient: gradient, False),
        (lambda rank, gradient: gradient / 8, False),
        (lambda rank, gradient: gradient + 0.1, False),  # such as weight decay
        (lambda rank, gradient: gradient.clip(-0.5, 0.5), True),
        (lambda rank, gradient: gradient / np.linalg.norm(gradient), True),
        (lambda rank, gradient: gradient + rank * np.linspace(-1, 1, len(gradient)), True),
    ],
)
def test_gradients_that_are_changed_before_the_average(change, is_found):
    """Oracle: only the same linear change on all ranks commutes with the mean."""
    right = run()
    ranks = []
    for rank in right.ranks:
        gradient = GRADIENTS[rank.number, 0] * (1 + 2 * rank.number)
        sent = Sent("w", projections(gradient), projections(change(rank.number, gradient)), "train.py:8")
        ranks.append(Rank((*rank.records[:-1], sent, rank.records[-1])))
    assert names(replace(right, ranks=tuple(ranks))) == ["clipped-before-average"] * is_found


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ({"loop": 2}, ["validation-of-one-rank"]),
        ({"loop": 2, "is_training": True}, ["validation-of-one-rank"]),  # without torch.no_grad
        ({"loop": 1}, []),  # a teacher, in the loop that trains
        ({"loop": 2, "in_eval": False}, []),  # running statistics for averaged weights
        ({"loop": 2, "rows": ("{} 0 0", "{} 0 1")}, []),  # training samples
    ],
)
def test_calls_that_validate(forward, expected):
    right = run()
    ranks = []
    for rank in right.ranks:
        call = replace(Forward(4, 2, False, ("{} a", "{} b"), None, {}, None, "train.py:20"), **forward)
        call = replace(call, rows=tuple(row.format(rank.number) for row in call.rows))
        ranks.append(Rank((*rank.records[:-1], Loop(2, "train.py:19", 3), call, rank.records[-1])))
    assert names(replace(right, ranks=tuple(ranks))) == expected


def test_files_of_one_line_are_one_finding():
    [finding] = findings(Runs(ALONE, with_more(Write("/a.pt", "train.py:20"), Write("/b.pt", "train.py:20"))))
    assert "/a.pt, /b.pt" in finding.evidence


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"wrapper": ""}, "for the weights of the optimizer that steps in train.py:9"),
        ({"wrapper": "train.py:3", "bypass": "no_sync"}, "no_sync"),
        ({"wrapper": "train.py:3", "bypass": "inner"}, "itself, not the model inside"),
        ({"wrapper": "train.py:3", "num_unwrapped": 1}, "all weights"),
    ],
)
def test_advice_for_gradients_that_are_not_averaged(step, expected):
    wrapper = Wrapped("DistributedDataParallel", "train.py:3")

    def change(rank, one):
        [gradient] = one.gradients
        return {"gradients": (replace(gradient, applied=gradient.local),), **step}

    apart = map_steps(run(), change)
    ranks = [
        Rank((rank.records[0], World("torch.distributed", rank.number, 2, ""), wrapper, *rank.records[2:]))
        for rank in apart.ranks
    ]
    [finding] = findings(Runs(ALONE, replace(apart, ranks=tuple(ranks))))
    assert finding.name == "gradients-not-averaged"
    assert expected in finding.mend


@pytest.mark.parametrize(
    ("digests", "keeps_buffers", "found", "num_perhaps"),
    [
        ((("a", "a"), ("a", "a")), False, [], 0),
        ((("a", "a"), ("b", "b")), False, ["buffers-differ"], 0),
        ((("a", "a"), ("b", "b")), True, [], 1),  # the script asks DDP not to send them
        ((("a", "c"), ("b", "d")), False, [], 1),  # running statistics, or a memory bank of each rank
        ((("a", "c"), ("b", "c")), False, [], 0),  # they are averaged, or sent
    ],
)
def test_what_a_model_does_not_train(digests, keeps_buffers, found, num_perhaps):
    ranks = []
    for rank, own in zip(run().ranks, digests, strict=True):
        values = iter((*own, None))
        records = [
            replace(one, buffers={"mean": value}) if isinstance(one, Forward) and (value := next(values)) else one
            for one in rank.records
        ]
        ranks.append(Rank((Wrapped("DistributedDataParallel", "", keeps_buffers=keeps_buffers), *records)))
    together = replace(run(), ranks=tuple(ranks))
    assert names(together) == found
    assert len(perhaps(Runs(ALONE, together), findings(Runs(ALONE, together)))) == num_perhaps


def test_an_optimizer_of_one_rank_is_left_out():
    """Rank 0 trains a probe between its steps, before and after them."""
    first, second = run().ranks
    records: list[object] = []
    for record in first.records:
        if isinstance(record, Step):
            records.append(replace(record, gradients=(), weights={"probe": "11"}, line="train.py:20", kind="Adam"))
            record = replace(record, optimizer=2)
        records.append(record)
    assert names(replace(run(), ranks=(Rank(tuple(records)), second))) == []


@pytest.mark.parametrize(
    ("losses", "wrapper", "expected"),
    [((1.0, 1.0), "a.py:1", []), ((1.0, 1.1), "a.py:1", ["line-search-alone"]), ((1.0, 1.1), "", [])],
)
def test_line_searches(losses, wrapper, expected):
    """Without a wrapper, gradients that nothing averages are the cause."""
    together = map_steps(run(), lambda rank, step: {"closure_loss": losses[rank], "wrapper": wrapper})
    assert names(together) == expected
