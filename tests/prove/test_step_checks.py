"""Findings on gradients and weights in made-up records. Oracle: arithmetic, and the planted fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prove_records import ALONE, GRADIENTS, map_steps, names, run, with_more

from allstep.commands.prove.checks import findings
from allstep.commands.prove.launching import Script
from allstep.commands.prove.observer.values import projections, stride
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    APPLIED,
    BACKWARD,
    FROZEN,
    TENSOR_PARALLEL,
    Collective,
    EarlyChange,
    Forward,
    Gradient,
    Sent,
    Step,
    Waiting,
    World,
    Wrapped,
    Yielded,
)
from allstep.commands.prove.report import report
from allstep.commands.prove.runs import Runs
from allstep.common.exact.replica_check import OUT_OF_STEP


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_step_that_does_not_wait_for_averages(is_wrapped):
    """All averages may come in time, some, or none, which tells nothing about the script."""
    wrapper = Wrapped("hvd.DistributedOptimizer", "train.py:3")
    for factor in (1, 2):
        right = map_steps(run(factor), lambda *_: {"is_wrapped": is_wrapped, "wrapper": "train.py:3"})
        early = EarlyChange(APPLIED, 1, "train.py:9")
        ranks = tuple(Rank((wrapper, early, *rank.records)) for rank in right.ranks)
        [finding] = findings(Runs(ALONE, replace(right, ranks=ranks)))
        assert (finding.name, finding.line) == ("gradients-not-averaged", "train.py:9")
        mend = (
            "optimizer.synchronize() before" if is_wrapped else "step the optimizer that hvd.DistributedOptimizer has"
        )
        assert finding.mend.startswith(mend)


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


def test_directions_are_the_same_for_all_and_linear():
    one, other = GRADIENTS[0, 0], GRADIENTS[1, 0]
    both = np.add(projections(one), projections(other))
    assert np.allclose(both, projections(one + other))
    assert projections(np.array([1.0, np.inf])) is None


@pytest.mark.parametrize("num_values", [1, 4096, 4097, 10**6])
def test_large_tensors_are_looked_at_in_places(num_values):
    assert len(range(0, num_values, stride(num_values))) <= 4096


@pytest.mark.parametrize(
    ("weights", "after", "expected"),
    [
        (("00", "00", "00"), "r", []),
        (("00", "00", "0r"), "r", ["weights-part"]),  # one rank has loaded others
        (("00", "0r", "12"), "1r", []),  # an average of weights (local SGD)
        (("00", "0r", "10"), "1r", ["weights-part"]),  # all ranks load a checkpoint of rank 0
    ],
)
def test_weights_in_later_steps(weights, after, expected):
    def change(rank, step):
        before = weights[step.number - 1].replace("r", str(rank))
        return {"weights": {"w": before}, "after": {"w": after.replace("r", str(rank))}}

    is_local = weights[2] == "12"  # then the rate is not scaled
    assert names(map_steps(run(rate=0.1 if is_local else 0.2), change)) == expected


@pytest.mark.parametrize(("is_set", "lines"), [(True, ["train.py:20"]), (False, ["train.py:9", "train.py:20"])])
def test_an_outer_optimizer_that_averages_nothing(is_set, lines):
    """The steps of the inner one, as of DiLoCo, are those of each rank."""
    ranks = []
    for rank in map_steps(run(), lambda rank, step: {"weights": {"w": f"{rank} {step.number}"}}).ranks:
        records = []
        for one in rank.records[:-1]:
            if isinstance(one, Step):
                own = projections(GRADIENTS[rank.number, one.number - 1])
                weights = {"w": "00"} if one.number == 1 else one.weights
                one = replace(one, weights=weights, gradients=(Gradient("w", own, own),))
                gradient = Gradient("outer", None if is_set else own, own)
                other = replace(one, optimizer=2, weights={}, gradients=(gradient,), line="train.py:20")
                records += [one, other]
            else:
                records.append(one)
        ranks.append(Rank((*records, rank.records[-1])))
    found = findings(Runs(None, replace(run(), ranks=tuple(ranks))))
    assert [(one.name, one.line) for one in found] == [("gradients-not-averaged", line) for line in lines]


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("logits = left @ right.T", [], True),
        ("logits = torch.mm(left, right.t())", [], True),
        ("scores = queries @ keys.transpose(-2, -1)", [], False),  # attention
        ("logits = left @ right.T", ["all_reduce"], False),
    ],
)
def test_losses_that_may_compare_samples_of_a_rank_alone(text, kinds, expected, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(text)
    records = [Forward(4, 1, True, ("a",), None, {}, None, "train.py:7")]
    records += [Collective(kind, "", (4,), "train.py:8") for kind in kinds]
    runs = Runs(ALONE, with_more(*records, Waiting(BACKWARD, "train.py:8")), script)
    printed = report(Script(script, (), "torchrun", 3, 60), runs, [])
    assert ("whether losses that compare samples" in printed) == expected


@pytest.mark.parametrize(
    ("names_of", "expected"), [("ab", "gradients-not-averaged"), ("b", "gradients-partly-averaged")]
)
def test_gradients_that_a_common_norm_scales(names_of, expected):
    """Clipping by the norm of two weights, one of which is not averaged, changes both on each rank."""

    def change(rank, step):
        [whole] = step.gradients
        averaged = {name: whole.local if name in names_of else whole.applied for name in "ab"}
        clipped = {name: tuple(value / (rank + 3) for value in averaged[name]) for name in "ab"}
        return {"gradients": tuple(Gradient(name, whole.local, clipped[name], averaged[name]) for name in "ab")}

    assert names(map_steps(run(), change)) == [expected]


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
    ("step", "expected"),
    [
        ({"wrapper": ""}, "for the weights of the optimizer that steps in train.py:9"),
        ({"wrapper": "train.py:3", "bypass": "no_sync"}, "no_sync"),
        ({"wrapper": "train.py:3", "bypass": "inner"}, "itself, not the model inside"),
        ({"wrapper": "train.py:3", "num_unwrapped": 1}, "all weights"),
        ({"wrapper": "train.py:3"}, "communication hook"),
        ({"local": None}, "that the script sets"),
    ],
)
def test_advice_for_gradients_that_are_not_averaged(step, expected):
    """Gradients without backward are those that the script sets, as of DiLoCo's outer step."""
    wrapper = Wrapped("DistributedDataParallel", "train.py:3")

    def change(rank, one):
        [gradient] = one.gradients
        own = replace(gradient, applied=gradient.local, local=step.get("local", gradient.local))
        return {"gradients": (own,), **{name: value for name, value in step.items() if name != "local"}}

    apart = map_steps(run(), change)
    ranks = [
        Rank((rank.records[0], World("torch.distributed", rank.number, 2, ""), wrapper, *rank.records[2:]))
        for rank in apart.ranks
    ]
    [finding] = findings(Runs(ALONE, replace(apart, ranks=tuple(ranks))))
    assert finding.name == "gradients-not-averaged"
    assert expected in finding.mend


@pytest.mark.parametrize(
    ("is_averaged", "kind", "expected"),
    [
        (False, "broadcast", ["gradients-not-averaged"]),
        (False, "all_reduce", []),  # in a hook before the observer's
        (True, "reduce", []),
    ],
)
def test_shares_of_weights_whose_gradients_are_not_averaged(is_averaged, kind, expected):
    """Each rank steps one of two weights, as a ZeRO by hand does. Oracle: the mean of the ranks' gradients."""

    def change(rank: int, step: Step) -> dict[str, object]:
        [gradient] = step.gradients
        applied = gradient.applied if is_averaged else gradient.local
        name = f"w{rank}"
        return {"weights": {name: "00"}, "gradients": (replace(gradient, name=name, applied=applied),)}

    apart, call = map_steps(run(), change), Collective(kind, "", (50,), "train.py:8")
    ranks = [Rank((*rank.records[:4], call, *rank.records[4:])) for rank in apart.ranks]
    assert names(replace(apart, ranks=tuple(ranks))) == expected


@pytest.mark.parametrize(
    ("losses", "wrapper", "expected"),
    [((1.0, 1.0), "a.py:1", []), ((1.0, 1.1), "a.py:1", ["line-search-alone"]), ((1.0, 1.1), "", [])],
)
def test_line_searches(losses, wrapper, expected):
    """Without a wrapper, gradients that nothing averages are the cause."""
    together = map_steps(run(), lambda rank, step: {"closure_loss": losses[rank], "wrapper": wrapper})
    assert names(together) == expected


def test_steps_that_do_not_fit_in_a_loop_that_averages_by_itself():
    """Rank 0 skips most of its steps. Oracle: the averages of the same batch are the same on both ranks."""
    first, second = run().ranks
    batches = [Yielded(1, record.rows) for record in second.records if isinstance(record, Forward)]
    ranks = []
    for rank, num_skipped in ((first, 2), (second, 0)):
        others = [record for record in rank.records[:-1] if not isinstance(record, Step)]
        taken = [record for record in rank.records if isinstance(record, Step)][num_skipped:]
        pairs = zip(batches[num_skipped:], taken, strict=True)
        steps = [(batch, replace(step, number=number)) for number, (batch, step) in enumerate(pairs, 1)]
        records = (*others, *batches[:num_skipped], *(one for pair in steps for one in pair), rank.records[-1])
        ranks.append(Rank(records))
    assert names(replace(run(), ranks=tuple(ranks))) == ["steps-skipped"]


def test_ranks_that_share_tensors_need_the_same_samples():
    """Oracle: gradients differ since samples do; without tensor parallelism nothing averages them."""
    parallel = Wrapped("parallelize_module", "train.py:3", TENSOR_PARALLEL)
    apart = map_steps(run(), lambda _, one: {"gradients": (replace(one.gradients[0], applied=one.gradients[0].local),)})
    assert names(apart) == ["gradients-not-averaged"]
    ranks = [Rank((*rank.records[:2], parallel, *rank.records[2:])) for rank in apart.ranks]
    assert names(replace(apart, ranks=tuple(ranks))) == ["samples-differ"]


@pytest.mark.parametrize(
    ("kind", "wrapper", "is_apart"),
    [("all_reduce", "", False), ("all_gather_object", "", False), ("broadcast", "", True), ("all_reduce", "DDP", True)],
)
def test_rounds_of_federated_averages_with_a_model_each(kind, wrapper, is_apart):
    """Ranks part in a round, whose optimizer never sees them together again; folds with equal seeds are no rounds."""

    def change(rank, step):
        fields = {"optimizer": 2, "number": 1} if step.number == 3 else {}
        own = tuple(replace(one, applied=one.local) for one in step.gradients)
        weights = {"w": f"{rank if step.number == 2 else 0} {step.number}"}
        return {"gradients": own, "weights": weights, "wrapper": wrapper, **fields}

    together = map_steps(run(rate=0.1), change)
    between = Collective(kind, "", (50,), "train.py:12")
    ranks = tuple(Rank((*rank.records[:-3], between, *rank.records[-3:])) for rank in together.ranks)
    expected = ["gradients-not-averaged", "learning-rate-not-scaled"] * is_apart
    assert names(replace(together, ranks=ranks)) == expected


def test_a_weight_whose_gradients_are_the_same_is_no_sign_of_an_average():
    """All ranks compute the same gradient of a temperature from a loss over the samples of all ranks."""

    def change(rank, step, local):
        [gradient] = step.gradients
        other = Gradient("temperature", local[rank], (1.0,))
        return {"gradients": (replace(gradient, applied=gradient.local), other)}

    for local, expected in ((((1.0,), (1.0,)), "not"), (((0.0,), (2.0,)), "partly"), ((None, None), "partly")):
        apart = map_steps(run(), lambda rank, step, local=local: change(rank, step, local))
        assert names(apart) == [f"gradients-{expected}-averaged"]


def test_averages_that_each_rank_clips_by_another_norm():
    def change(rank, step):
        [gradient] = step.gradients
        own = tuple(0.5**rank * value for value in gradient.applied)
        return {"gradients": (replace(gradient, applied=own),), "wrapper": "train.py:3"}

    [finding] = findings(Runs(ALONE, map_steps(run(), change)))
    assert finding.name == "gradients-not-averaged"
    assert "0.5 times" in finding.evidence


def test_single_numbers_are_always_proportional():
    """Oracle: the gradients of a temperature on two ranks, each other's multiple by chance."""

    def change(rank, _):
        return {"gradients": (Gradient("temperature", *[projections(np.array([1.0 + rank]))] * 2),)}

    [finding] = findings(Runs(ALONE, map_steps(run(), change)))
    assert finding.mend.startswith("optimizer = hvd.DistributedOptimizer")


@pytest.mark.parametrize(("teacher", "expected"), [("aab", ["buffers-differ"]), ("aaa", []), ("baa", [])])
def test_weights_that_no_optimizer_trains(teacher, expected):
    """A teacher that only rank 0 averages differs from then on."""
    ranks = []
    for rank in run().ranks:
        digests = teacher if rank.number else "aaa"
        calls = [
            Forward(step, 1, True, (), None, {f"{FROZEN}w": digests[step - 1]}, None, "train.py:6")
            for step in (1, 2, 3)
        ]
        ranks.append(Rank((*rank.records[:-1], *calls, rank.records[-1])))
    assert names(replace(run(), ranks=tuple(ranks))) == expected


@pytest.mark.parametrize("moment", ["after batch 1", "before the second step"])
def test_weights_that_the_drop_in_refuses(moment):
    """Keras' weights are compared from the second step on, which the drop-in does not let a script reach."""
    assert names(replace(run(), failure=f"RuntimeError: {OUT_OF_STEP} {moment}; received others")) == ["weights-differ"]


@pytest.mark.parametrize(("group", "is_judged"), [((0,), False), ((0, 1), True), ((), True)])
def test_groups_of_ranks_that_train_models_of_their_own(group, is_judged):
    """Each member of an ensemble has a process group, and begins with other weights. Oracle: the records alone."""

    def change(rank, step):
        [gradient] = step.gradients
        return {"gradients": (replace(gradient, applied=gradient.local),), "weights": {"w": f"{rank} {step.number}"}}

    together = map_steps(run(rate=0.1), change)
    wrapped = Wrapped("DistributedDataParallel", "train.py:3", ranks=group)
    ranks = tuple(Rank((*rank.records[:2], wrapped, *rank.records[2:])) for rank in together.ranks)
    assert ("gradients-not-averaged" in names(replace(together, ranks=ranks))) == is_judged
