"""Components for a user's training loop, without ranks: order of samples, checkpoints, and results from ranks."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from allstep.common.api import checkpoint
from allstep.common.api.session import as_words
from allstep.common.api.user_loop import Order, Shard
from allstep.common.api.user_parts import Parts, check_kind
from allstep.common.base.errors import UserError
from allstep.common.data.sharding import Position
from allstep.common.files import array_json
from allstep.common.launch.placement import ALONE, Placement

VALUE = {
    "arrays": [np.arange(6.0).reshape(2, 3), np.array(3, np.int64), np.zeros((0, 2), np.uint8)],
    "numbers": [1, 2.5, True, None, float("inf"), -float("inf")],
    "by number": {0: {"step": np.float32(4)}, 7: "text"},
    "tuple": (3, (random.getstate()[1][0], None), [()]),
    "marks": [{"non_finite": 3}, {"__array__": 0, "__number__": {"__pairs__": 1}}, {1: 2, "a": 3}],
}


def test_values_come_back_as_they_were(tmp_path):
    array_json.save(tmp_path / "a", VALUE)
    found = array_json.load(tmp_path / "a")
    for expected, array in zip(VALUE["arrays"], found["arrays"], strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
    assert found["numbers"] == VALUE["numbers"] and found["by number"] == {0: {"step": 4.0}, 7: "text"}
    assert found["marks"] == VALUE["marks"] and found["tuple"] == VALUE["tuple"]
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".json", ".npy"}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        ({(1, 2): 3}, "dict"),
        ({None: 0}, "dict"),
        (np.array([object()]), "ndarray of object"),
        (np.ma.masked_array([1, 2], [0, 1]), "MaskedArray of int64"),
        (torch.ones(2, dtype=torch.bfloat16), "Tensor of torch.bfloat16"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_json_has_not_is_refused(value, kind, tmp_path):
    with pytest.raises(UserError, match=f"expected numbers, texts, arrays, .*received .*{kind}"):
        array_json.save(tmp_path / "a", value)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    nested = []
    for _ in range(200):
        nested = [nested]
    endless = []
    endless.append(endless)
    for value in (nested, endless, {"number": 10**5000}):
        with pytest.raises(UserError, match="expected values that can be read again: "):
            array_json.save(tmp_path / "a", value)
    for step, keep in ((-1, 3), (1, 0)):
        with pytest.raises(UserError, match=f"expected step >= 0 and keep >= 1, received {step} and {keep}"):
            checkpoint.save(tmp_path, step, {}, keep=keep)
    assert not [*tmp_path.iterdir()]


def test_numbers_that_json_lacks_come_back_from_earlier_versions(tmp_path):
    (tmp_path / "values.json").write_text('{"a": {"__number__": "inf"}, "b": [{"non_finite": "-inf"}]}')
    assert array_json.load(tmp_path) == {"a": float("inf"), "b": [-float("inf")]}


@pytest.mark.parametrize(
    "text",
    ["{", '{"__array__": 0}', '{"__tuple__": 3}', '{"__array__": "../../x"}', '{"__pairs__": 1}', '{"non_finite": []}'],
)
def test_damaged_values(text, tmp_path):
    (tmp_path / "values.json").write_text(text)
    with pytest.raises(UserError, match="expected a value in"):
        array_json.load(tmp_path)


def test_checkpoints_are_whole_and_the_last_ones_are_kept(tmp_path):
    assert checkpoint.load(tmp_path) is None
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"w": np.full(3, step)}, keep=2)
    (tmp_path / ".partial").mkdir()  # as a kill leaves it
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial", "step-00000004", "step-00000005"]
    step, state = checkpoint.load(tmp_path, as_array=np.ndarray.tolist)
    assert step == 5 and state == {"w": [5, 5, 5]}


def test_a_loop_that_starts_again_keeps_its_checkpoints_and_the_earlier_ones(tmp_path, capfd):
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, {"run": 1})
    for step in (10, 11, 12):
        checkpoint.save(tmp_path, step, {"run": 2})
        assert checkpoint.load(tmp_path) == (step, {"run": 2})
    assert checkpoint.load(tmp_path / "previous-1") == (30, {"run": 1})
    assert capfd.readouterr().err.count("later steps of an earlier run, kept in") == 1
    assert [path.name[:5] for path in sorted(tmp_path.iterdir())] == ["previ", "step-", "step-", "step-"]


def test_a_checkpoint_that_is_being_replaced_is_found(tmp_path):
    """A kill may leave it under its second name."""
    checkpoint.save(tmp_path, 3, {"run": 1})
    (tmp_path / "step-00000003").rename(tmp_path / ".old-step-00000003")
    assert checkpoint.load(tmp_path) == (3, {"run": 1})
    checkpoint.save(tmp_path, 3, {"run": 2})
    assert checkpoint.load(tmp_path) == (3, {"run": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sample_comes_once_on_any_number_of_ranks(drop_last):
    def seen(world_size: int) -> list[set[int]]:
        ranks = [lambda rank=rank: (rank, world_size) for rank in range(world_size)]
        orders = [Order(103, 10, seed=1, drop_last=drop_last, ranks=each) for each in ranks]
        steps = zip(*(order.rest_of_epoch(Position(2, 0)) for order in orders), strict=True)
        batches = []
        for step in steps:
            assert sum(weight for _, weight, _ in step) == pytest.approx(world_size)
            batches.append({int(index) for indices, weight, _ in step for index in indices if weight})
        return batches

    alone = seen(1)
    assert sum(map(len, alone)) == len(set.union(*alone)) == (100 if drop_last else 103)
    assert seen(4) == seen(7) == alone


def test_a_shard_goes_on_at_any_batch():
    order = Order(23, 5, seed=0, drop_last=False)

    def read_ahead(indices):
        return iter([batch.tolist() for batch in indices])

    shard = Shard(order, read_ahead)
    whole = [(batch, shard.position) for _ in range(2) for batch in shard]
    assert len(shard) == 5 and shard.position == Position(2, 0)
    assert sorted(index for batch, _ in whole[:5] for index in batch) == list(range(23))
    counted = Shard(order, read_ahead)
    assert [batch for _ in range(2) for _, batch in zip(range(5), counted, strict=False)] == [b for b, _ in whole]
    for done in (1, 4, 5, 7):
        other = Shard(order, read_ahead)
        other.position = whole[done - 1][1]
        assert list(other) == [batch for batch, _ in whole[done : 5 * (1 + done // 5)]]


def test_keywords_are_flags():
    words = as_words({"epochs": 3, "compile": True, "drop_last": False, "batch_ramp": ("1:2", "3:4"), "base_lr": None})
    assert words[4:] == ["--epochs", "3", "--compile", "--no-drop-last", "--batch-ramp", "1:2", "3:4"]
    assert json.dumps(words[:4]) == '["--model", "program", "--dataset", "program"]'


def test_what_a_program_gives_as_its_optimizer():
    assert Parts(optimizer=lambda: 3).optimizer_or(str, "program") == 3
    assert Parts().optimizer_or(lambda: 4, "sgd") == 4
    with pytest.raises(UserError, match="a function that builds the optimizer, received function: missing a required"):
        Parts(optimizer=lambda model: model).optimizer_or(str, "program")
    check_kind(ALONE, Placement)
    with pytest.raises(UserError, match="a name of --optimizer or an optimizer of allstep, received dict; give one"):
        check_kind({}, Placement)
