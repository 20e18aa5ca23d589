"""Findings in made-up records, without a script. Oracle: arithmetic, and the fault that the records contain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prove_records import ALONE, map_steps, names, run, with_more

from allstep.commands.prove.checks import findings, perhaps
from allstep.commands.prove.launching import Script, failure_of, is_deadlock
from allstep.commands.prove.observer.observer import headline
from allstep.commands.prove.rank import Rank
from allstep.commands.prove.records import (
    BACKWARD,
    JOIN,
    Collective,
    Ended,
    Forward,
    HostCopy,
    Kept,
    Loop,
    Read,
    Record,
    Restored,
    Resumed,
    Sampler,
    Started,
    Step,
    Waiting,
    World,
    Wrapped,
    Write,
    Yielded,
)
from allstep.commands.prove.report import report
from allstep.commands.prove.runs import Run, Runs
from allstep.common.base.errors import UserError

_GRAPH = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
  File "script.py", line 14, in <module>
{}
\t [[{{{{node PyFunc}}}}]] [Op:__inference_g_23]"""


@pytest.mark.parametrize(("in_model", "by_library"), [(True, False), (True, True), (False, False)])
def test_random_numbers_that_are_the_same_on_all_ranks(in_model, by_library):
    """A library that seeds all ranks alike may be meant to, as may the same augmentation."""
    right = run()
    ranks = []
    for rank in right.ranks:
        draws = {"random_state": "00" if in_model else None, "by_library": by_library}
        records = [replace(one, **draws) if isinstance(one, Forward) else one for one in rank.records[:-1]]
        batches = [Yielded(1, (), (f"{rank.number}", "same", "")) for _ in range(2)]
        ranks.append(Rank((*records, *batches, rank.records[-1])))
    runs = Runs(ALONE, replace(right, ranks=tuple(ranks)))
    found = findings(runs)
    assert [finding.name for finding in found] == ["dropout-same"] * (in_model and not by_library)
    assert len(perhaps(runs, found)) == (by_library or not in_model)


@pytest.mark.parametrize("by_library", [False, True])
def test_a_search_for_unused_parameters_that_a_library_asks_for(by_library):
    wrapped = Wrapped("DistributedDataParallel", "train.py:3", finds_unused=True, by_library=by_library)
    runs = Runs(ALONE, with_more(wrapped))
    found = findings(runs)
    assert [one.name for one in found] == ["unused-parameters-searched"] * (not by_library)
    assert ["ddp_find_unused_parameters=False" in line for line in perhaps(runs, found)] == [True] * by_library


@pytest.mark.parametrize("status", [None, 1])
def test_an_error_of_a_rank_is_the_cause_before_its_launcher_has_ended(status):
    [first, second] = run().ranks
    failed = Rank((*second.records[:-1], Ended("RuntimeError: no data", "")))
    failed_too = Rank((*first.records[:-1], Ended("RuntimeError: no data", "")))
    assert failure_of(Run(2, (failed_too, failed), {}), status, "no line of it") == "RuntimeError: no data"
    waits = Rank((*first.records[:-1], Waiting("all_reduce", "train.py:9")))
    told = "RuntimeError: no data, while rank 0 was in all_reduce (train.py:9)"
    assert failure_of(Run(2, (waits, failed), {}), 1, "") == told


def test_a_rank_that_needs_one_that_was_seen_enough_has_no_fault():
    """A rank stopped after enough steps may break the other's collective; a rank that fails itself has a fault."""
    [first, second] = run().ranks
    seen = Rank((*first.records[:-1], Ended("steps", "")))
    failed = Rank((*second.records[:-2], Ended("RuntimeError: the connection is closed", "train.py:9")))
    assert failure_of(Run(2, (seen, failed), {}), 1, "") == ""
    assert names(Run(2, (seen, failed), {})) == []
    early = Rank((*second.records[:4], Ended("RuntimeError: no data", "")))
    assert failure_of(Run(2, (seen, early), {}), 1, "") == "RuntimeError: no data"
    found = findings(Runs(ALONE, Run(2, (first, failed), {})))
    assert ("collective-left-out", "train.py:9") in [(one.name, one.line) for one in found]


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
            _GRAPH.format("2 root error(s) found.\n  (0) ABORTED:  no data\n\n0 derived errors ignored."),
            "(0) ABORTED:  no data",
        ),
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
    ("reason", "after", "text", "is_found"),
    [
        ("script", (None, None), "", True),
        ("RuntimeError: no memory", (None, None), "", False),  # it does not show whether it would combine the results
        ("script", (Collective("recv", "", (1,), "a:9"), Collective("send", "", (1,), "a:9")), "", False),
        ("script", (Write("/part0", "a:9"), Write("/part1", "a:9")), "", False),
        ("script", ((Write("/part0", "a:9"), Read("/part0")), Write("/part1", "a:9")), "", True),
        ("script", ((Write("/part0", "a:9"), Read("/part0"), Read("/part1")), Write("/part1", "a:9")), "", False),
        ("script", ((Write("/part0", "a:9"), Read("/part0")), (Write("/part1", "a:9"), Read("/part1"))), "", False),
        ("script", ((Write("/log0", "a:8"), Read("/log0")), Write("/part1", "a:9")), "", False),
        ("script", (Write("/best.pt", "a:9"), None), "", True),
        ("script", (Write("/best.pt", "a:9"), Write("/best.pt", "a:9")), "", True),  # and every rank writes
        ("script", (None, None), "from mpi4py import MPI", False),
        ("script", (None, None), "store = dist.FileStore('results')", False),
        ("script", (None, None), "checkpoint.restore(path)  # not to store results", True),
    ],
)
def test_a_validation_that_is_not_reduced(reason, after, text, is_found, tmp_path):
    """Rank 0 may get results by messages, by files, or by libraries that are not observed."""
    right, ranks = run(), []
    for rank, more in zip(right.ranks, after, strict=True):
        evaluation = Forward(4, 2, False, (f"{rank.number}",), None, {}, None, "train.py:20")
        records = more if isinstance(more, tuple) else filter(None, [more])
        ranks.append(Rank((*rank.records[:-1], evaluation, *records, Ended(reason, ""))))
    script = tmp_path / "train.py"
    script.write_text(text)
    found = findings(Runs(ALONE, replace(right, ranks=tuple(ranks)), script if text else None))
    assert ("validation-of-one-rank" in [one.name for one in found]) == is_found


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


def test_ranks_that_never_step_are_refused():
    """Rank 0 alone steps, as a parameter server does; such ranks cannot be cut alike."""
    first, second = run().ranks
    idle = Rank(tuple(Waiting(BACKWARD, "") if isinstance(one, Step) else one for one in second.records))
    with pytest.raises(UserError, match="no step on rank 1"):
        Script(Path("train.py"), (), "torchrun", 4, 1.0)._check(replace(run(), ranks=(first, idle)), "")


def test_ranks_that_wait_at_different_places():
    right = run()
    waits = [Waiting("all_reduce", "train.py:30"), Waiting("barrier", "train.py:40")]
    calls = [Collective("all_reduce", "", (1,), "train.py:30"), Resumed()]
    ranks = [Rank((*rank.records[:-1], call, wait)) for rank, call, wait in zip(right.ranks, calls, waits, strict=True)]
    [finding] = findings(Runs(ALONE, replace(right, ranks=tuple(ranks), stacks={0: "", 1: ""})))
    assert finding.name == "collective-left-out"
    assert "train.py:30" in finding.evidence
    assert "train.py:40" in finding.evidence
    ranks = [Rank(tuple(one for one in rank.records if not isinstance(one, Step))) for rank in ranks]
    at_once = Runs(ALONE, replace(right, ranks=tuple(ranks), stacks={0: "", 1: ""}))
    assert "after 0 steps" in report(Script(Path("train.py"), (), "torchrun", 4, 1.0), at_once, findings(at_once))


@pytest.mark.parametrize("own", [{}, {"bypasses": "DistributedDataParallel"}])
@pytest.mark.parametrize("error", ["RuntimeError: Connection reset by peer", ""])
def test_a_wrapper_that_one_rank_calls_alone(own, error):
    """Its collectives are taken for those of the next step, so that ranks fail at one line, or the library aborts."""
    right = run()
    call = replace(Forward(2, 1, False, ("a",), None, {}, None, "train.py:20"), **own)
    ends = [[Ended(error, "train.py:7")] if error else [], [Waiting("the model", "train.py:7", computes=True)]]
    ranks = [Rank((*rank.records[:-1], *end)) for rank, end in zip(right.ranks, ends, strict=True)]
    ranks[0] = Rank((*ranks[0].records[:5], call, *ranks[0].records[5:]))
    failed = replace(right, ranks=tuple(ranks), failure=error or "Signal 6 (SIGABRT) received")
    found = [(one.name, one.line) for one in findings(Runs(ALONE, failed))]
    assert found == [("collective-left-out", "train.py:20")] * (not own)


@pytest.mark.parametrize(
    ("stale", "expected"), [(0, []), (2, ["weights-part"]), (1, [])], ids=["sent", "kept", "a part of each rank"]
)
def test_weights_that_other_ranks_step(stale, expected):
    """Each rank steps one of two weights, as a ZeRO by hand does; `stale` is the first step before which one is old."""

    def change(rank: int, step: Step) -> dict[str, object]:
        digests = {name: f"{name}{step.number}" for name in "ab"}
        if rank and stale and step.number >= stale:
            digests["a"] = "a1" if stale > 1 else "c"
        return {"weights": {"ab"[rank]: digests["ab"[rank]]}, "others": {"ba"[rank]: digests["ba"[rank]]}}

    assert names(map_steps(run(), change)) == expected


def test_steps_fit_again_after_a_join():
    """The rank with more batches has taken a step more before it, with its own gradient alone."""
    right, ranks = run(), []
    for rank in right.ranks:
        *before, step = rank.records[:5]
        [gradient] = step.gradients
        alone = replace(step, number=2, gradients=(replace(gradient, applied=gradient.local),))
        joined = Collective(JOIN, "", (), "train.py:11")
        ranks.append(Rank((*before, step, *[alone] * (rank.number == 0), joined, *rank.records[5:])))
    assert not names(replace(right, ranks=tuple(ranks)))
    without = (Rank(tuple(one for one in rank.records if one != joined)) for rank in ranks)
    assert "gradients-not-averaged" in names(replace(right, ranks=tuple(without)))


@pytest.mark.parametrize(
    ("of_thread", "hangs"),
    [([Waiting("scatter", "", thread=1)], True), ([Waiting("scatter", "", thread=1), Resumed(1)], False)],
)
def test_ranks_whose_threads_share_a_process_group(of_thread, hangs):
    """All ranks wait at the same places; only the order in which two threads came to them may differ."""
    right, wait = run(), Waiting("backward", "train.py:8", computes=True)
    ranks = [Rank((*rank.records[:-1], wait, *of_thread)) for rank in right.ranks]
    assert is_deadlock(ranks) == hangs
    if hangs:
        [finding] = findings(Runs(ALONE, replace(right, ranks=tuple(ranks), stacks={0: "", 1: ""})))
        assert finding.name == "collective-left-out"
        assert "waits in backward at train.py:8 and scatter in another thread after" in finding.evidence
        assert "a process group of their own" in finding.mend


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
    ("digests", "keeps_buffers", "found", "num_perhaps"),
    [
        ((("a", "a"), ("a", "a")), False, [], 0),
        ((("a", "a"), ("b", "b")), False, ["buffers-differ"], 0),
        ((("a", "a"), ("b", "b")), True, [], 1),  # the script asks DDP not to send them
        ((("a", "c"), ("b", "d")), False, [], 1),  # running statistics, or a memory bank of each rank
        ((("0", "a", "c"), ("0", "b", "d")), False, [], 1),  # such as a teacher's centre, which begins with zeros
        ((("0", "a", "c"), ("0", "b", "c")), False, [], 0),
        ((("a", "c"), ("b", "c")), False, [], 0),  # they are averaged, or sent
    ],
)
def test_what_a_model_does_not_train(digests, keeps_buffers, found, num_perhaps):
    ranks = []
    for rank, own in zip(run().ranks, digests, strict=True):
        values = iter(own)
        records = [
            replace(one, buffers={"mean": next(values)}) if isinstance(one, Forward) and one.step <= len(own) else one
            for one in rank.records
        ]
        ranks.append(Rank((Wrapped("DistributedDataParallel", "", keeps_buffers=keeps_buffers), *records)))
    together = replace(run(), ranks=tuple(ranks))
    assert names(together) == found
    assert len(perhaps(Runs(ALONE, together), findings(Runs(ALONE, together)))) == num_perhaps
    assert all("hvd.broadcast_parameters(model.state_dict()" in one.mend for one in findings(Runs(ALONE, together)))


@pytest.mark.parametrize(
    ("weights", "rows", "evaluates", "found", "num_perhaps"),
    [
        (("abc", "abc"), "01", True, [], 0),
        (("abc", "abc"), "00", True, ["validation-repeated"], 0),
        (("bcd", "aaa"), "00", True, ["buffers-differ"], 0),  # rank 0 alone updates an average
        (("abc", "aaa"), "00", False, ["buffers-differ"], 0),  # the same of a target, beside training
        (("bcd", "efg"), "01", True, ["buffers-differ"], 0),  # shares of the samples, by different models
        (("bcd", "efg"), "00", True, [], 1),  # each rank looks at checkpoints of its own
        (("bcd", "efg"), "01", False, [], 1),  # opponents, or averages that begin with other weights
        (("bbd", "bbg"), "01", False, [], 0),  # mutations of a policy
    ],
)
def test_models_that_are_called_without_gradients(weights, rows, evaluates, found, num_perhaps):
    ranks = []
    for rank in run().ranks:
        records: list[Record] = []
        for one in rank.records[:-1]:
            records.append(one)
            if isinstance(one, Step):
                call = Forward(one.number + 1, 1, False, (rows[rank.number],), None, {}, None, "train.py:20")
                own = weights[rank.number][one.number - 1]
                records.append(replace(call, weights=own, evaluates=evaluates))
                records.append(Collective("allreduce", "", (), ""))
        ranks.append(Rank(tuple(records)))
    runs = Runs(ALONE, replace(run(), ranks=tuple(ranks)))
    assert [one.name for one in findings(runs)] == found
    assert len(perhaps(runs, findings(runs))) == num_perhaps


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("ModelStateHandler", "OptimizerStateHandler", "SamplerStateHandler"), []),
        (("ModelStateHandler", "OptimizerStateHandler"), ["TorchState(sampler=sampler, ...)"]),
        (("SamplerStateHandler",), ["TorchState(model=model, optimizer=optimizer, ...)"]),
    ],
)
def test_what_an_elastic_state_holds(kinds, expected):
    right = with_more(Restored(kinds, "train.py:3"))
    loop = Loop(1, "train.py:5", 3, sampler=Sampler("ElasticSampler", True))
    ranks = [Rank(tuple(loop if isinstance(one, Loop) else one for one in rank.records)) for rank in right.ranks]
    lines = perhaps(Runs(ALONE, replace(right, ranks=tuple(ranks))), [])
    assert [line.rpartition("else: ")[2] for line in lines] == expected


@pytest.mark.parametrize(
    ("averages", "generators", "num_perhaps"),
    [
        ("aabbcc", "aabbcc", 1),  # averaged over the ranks, and the same random numbers
        ("abcdef", "abcdef", 1),  # each rank's own
        ("aabccc", "ababab", 0),  # now and then apart; a generator that no step draws from
    ],
)
def test_what_a_script_keeps_in_variables(averages, generators, num_perhaps):
    kept = [Kept({"centre": average}, {"rng": state}) for average, state in zip(averages, generators, strict=True)]
    ranks = [Rank((*one.records[:-1], *kept[one.number :: 2], one.records[-1])) for one in run().ranks]
    runs = Runs(ALONE, replace(run(), ranks=tuple(ranks)))
    assert findings(runs) == []
    assert len(perhaps(runs, [])) == num_perhaps


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
