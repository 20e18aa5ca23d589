"""Observers take apart inputs, loops and steps, without ranks. Oracle: the samples, and the order of what happens."""

from __future__ import annotations

import sys
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.rnn import pack_sequence

from allstep.commands.prove.observer.progress import Progress, may_stop
from allstep.commands.prove.observer.pytorch_values import as_rows, bytes_of, is_shard
from allstep.commands.prove.observer.pytorch_variables import averaged
from allstep.commands.prove.observer.values import Samples, finite, projections


@dataclass
class Graph:
    nodes: torch.Tensor
    edges: torch.Tensor


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))


Pair = namedtuple("Pair", "mask pixels")
_ONES = torch.ones(6, 9)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: ((x,), {}),
        lambda x: (({"mask": _ONES, "pixels": x},), {}),
        lambda x: ((), {"mask": _ONES, "pixels": x}),
        lambda x: ((UserDict(mask=_ONES, pixels=x),), {}),
        lambda x: (([x, _ONES],), {}),
        lambda x: ((Pair(_ONES, x), None, 3), {}),
        lambda x: (([{"image": row, "boxes": row[:2]} for row in x],), {}),
        lambda x: ((list(x.reshape(6, 1, 5, 1)),), {}),
        lambda x: ((Graph(x, torch.zeros(2, 11, dtype=torch.int64)),), {}),
        lambda x: ((x.to_sparse(),), {}),
        lambda x: ((x.numpy(),), {}),
        lambda x: (([str(row.tolist()) for row in x],), {}),
    ],
)
def test_samples_are_told_apart_in_any_structure(make):
    """Ranks have two samples of six in common: so have the rows, though masks are the same everywhere."""
    one, other = _batch(0), _batch(1)
    other[4:] = one[:2]
    first, second = (Samples(as_rows).rows(make(batch)) for batch in (one, other))
    assert len(first) == len(second) == 6
    assert first == Samples(as_rows).rows(make(one.clone()))
    assert len({*first} & {*second}) == 2


def test_samples_of_a_packed_sequence_are_its_time_steps():
    pairs = [pack_sequence([_batch(seed), _batch(seed + 1)[:3]]) for seed in (0, 5)]
    first, second = (Samples(as_rows).rows((pair,)) for pair in pairs)
    assert len(first) == 9
    assert not {*first} & {*second}


def test_inputs_that_stay_the_same_do_not_count():
    """A large table that a model gets in every call is no sample; samples that are all alike tell nothing of ranks."""
    table, samples = torch.randn(100, 50), Samples(as_rows)
    samples.rows((_batch(0), table))
    assert samples.rows((_batch(1), table)) == Samples(as_rows).rows(_batch(1))
    assert Samples(as_rows).rows(_ONES) == ()
    assert [samples.rows(_batch(2), 1) for _ in range(2)] == [Samples(as_rows).rows(_batch(2))] * 2
    assert samples.rows((3, None)) == ()


def test_samples_of_a_shard_are_those_of_its_rank():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        shard = distribute_tensor(_batch(0), init_device_mesh("cpu", (1,)), [Shard(0)])
    finally:
        torch.distributed.destroy_process_group()
    assert is_shard(shard)
    assert Samples(as_rows).rows(shard) == Samples(as_rows).rows(_batch(0))


def test_rows_with_few_values_count_as_one_sample():
    assert len(Samples(as_rows).rows(torch.tensor([0, 1, 0, 1, 1, 0]))) == 1


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(0, 3), torch.zeros(2, dtype=torch.bfloat16), torch.eye(2).to_sparse_csr(), torch.zeros(2).to(1j),
     torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), torch.nested.nested_tensor([torch.ones(2)])],
)  # fmt: skip
def test_any_kind_of_tensor_has_bytes(tensor):
    assert bytes_of(tensor).dtype.name == "uint8"
    assert not is_shard(tensor)


def test_tensors_in_functions_that_torch_transforms_have_their_bytes():
    given, seen = torch.randn(3, 2), []

    def note(weight, sample):
        seen.extend([bytes_of(weight), bytes_of(sample)])
        return (weight * sample).sum()

    torch.func.vmap(torch.func.grad(note), (None, 0))(given[0], given)
    assert seen[0].tobytes() == given[0].numpy().tobytes()
    assert (seen[1] == bytes_of(given)).all()


@pytest.mark.parametrize(("value", "is_kept"), [(2.0, True), (1e32, False), (float("nan"), False), (-1e31, False)])
def test_records_have_no_number_of_a_script_that_diverges(value, is_kept):
    assert (finite(value) == value) == is_kept
    assert (projections(np.array([value])) is not None) == is_kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for x in loader:\n    centre = 0.9 * centre + 0.1 * x", {"centre": 2}),
        ("for x in loader:\n    centre.mul_(m).add_(x, alpha=1 - m)", {"centre": 2}),
        ("for x in loader:\n    centre.data.lerp_(x, 0.1)", {"centre": 2}),
        ("class A:\n    def f(self, x):\n        self.c = self.c * self.m + x * (1 - self.m)", {"c": 3}),
        ("for x in loader:\n    x = 0.9 * x + 0.1 * noise", {}),  # a batch
        ("for epoch in epochs:\n    h = start\n    for x in loader:\n        h = m * h + (1 - m) * x", {}),
        ("class A:\n    def f(self):\n        self.x = dropout(self.x, p=0.5)", {}),
        ("class A:\n    def f(self, x):\n        self.x = 0.5 * self.x + 0.5 * x", {"x": 3}),
        ("for x in loader:\n    state = 0.9 * state + x", {}),  # such as that of a game
    ],
)
def test_moving_averages_in_the_text_of_a_script(text, expected, tmp_path):
    (tmp_path / "script.py").write_text(text)
    assert averaged(str(tmp_path / "script.py")) == expected


def _play(progress: Progress, num_batches: int, accumulated: int) -> int:
    """Train in the loop 1 until it is cut; return the number of batches."""
    for number in range(num_batches):
        if progress.is_over(1, number):
            return number
        progress.enter(1)
        progress.note_backward()
        if (number + 1) % accumulated == 0:
            progress.end_step(0, 1)
    return num_batches


@pytest.mark.parametrize(("accumulated", "expected"), [(1, 12), (8, 96), (5, 60)])
def test_loops_are_cut_after_whole_accumulation_rounds(accumulated, expected):
    """Four steps in the second epoch are three times as many in the first one."""
    assert _play(Progress(4), 1000, accumulated) == expected
    assert _play(Progress(4), 24, 8) == 24


def test_a_step_belongs_to_the_loop_that_has_yielded_last():
    progress = Progress(4)
    progress.enter(1)
    progress.enter(2)  # validation, inside of the loop
    assert progress.loop == 2
    assert [progress.is_over(2, number) for number in (3, 4)] == [False, True]
    progress.leave(2)
    assert progress.loop == 1
    progress.leave(1)
    assert progress.loop == 0


def _iterate(way: str) -> bool:
    """Return whether a loader that is iterated in this way may be cut."""
    found = []

    class Iterator:
        def __next__(self):
            found.append(may_stop(sys._getframe(1), (__file__,)))
            raise StopIteration

        def __iter__(self):
            return self

    if way == "for":
        for _ in Iterator():
            pass
    elif way == "enumerate":
        for _ in enumerate(Iterator()):
            pass
    elif way == "comprehension":
        [one for one in Iterator()]
    elif way == "default":
        next(Iterator(), None)
    elif way == "try":
        try:
            next(Iterator())
        except StopIteration:
            found.append(None)
    return found[0]


@pytest.mark.parametrize(
    ("way", "expected"),
    [("for", True), ("enumerate", True), ("comprehension", True), ("default", False), ("try", True)],
)
def test_only_loops_that_expect_an_end_are_cut(way, expected):
    assert _iterate(way) == expected
