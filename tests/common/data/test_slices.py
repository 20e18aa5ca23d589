"""The order of sums over slices. Oracle: the tree written out, with strings for numbers."""

import itertools

import numpy as np
import pytest

from allstep.common.data.sharding import rank_slice
from allstep.common.data.slices import SMALLEST_TRIAL, TreeSum, local_nodes, local_slices, trial


class Term(str):
    """A number whose sum shows how it was made."""

    def __add__(self, other: str) -> "Term":
        return Term(f"({str(self)}+{str(other)})")


def in_order(first: int, end: int) -> str:
    if end - first == 1:
        return str(first)
    middle = (first + end) // 2
    return f"({in_order(first, middle)}+{in_order(middle, end)})"


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 6, 7, 8, 13])
def test_every_number_of_ranks_adds_up_in_one_order(num_slices):
    for world_size in range(1, num_slices + 1):
        total: TreeSum[Term] = TreeSum(num_slices)
        for rank in reversed(range(world_size)):
            own: TreeSum[Term] = TreeSum(num_slices)
            for number in local_slices(rank, world_size, num_slices):
                own.add((number, number + 1), Term(number))
            assert tuple(sorted(own.partial)) == local_nodes(rank, world_size, num_slices)
            for node, value in own.partial.items():
                total.add(node, value)
        assert total.total == in_order(0, num_slices)


def test_slices_are_shared_out_in_their_order():
    for num_slices, world_size in itertools.product(range(1, 20), range(1, 9)):
        slices = [list(local_slices(rank, world_size, num_slices)) for rank in range(world_size)]
        assert list(itertools.chain(*slices)) == list(range(num_slices))
        assert max(map(len, slices)) - min(map(len, slices)) <= 1


@pytest.mark.parametrize(("num_slices", "world_size"), [(2, 2), (4, 2), (4, 4), (8, 4), (12, 4), (24, 8), (4, 3)])
def test_a_rank_sends_one_sum_where_the_tree_allows_it(num_slices, world_size):
    assert all(len(local_nodes(rank, world_size, num_slices)) == 1 for rank in range(world_size))


def test_a_slice_has_the_same_samples_on_any_number_of_ranks():
    """The samples of a rank begin with its first slice, even if slices cannot be distributed evenly."""
    from allstep.common.data.datasets.base import ArraySplit
    from allstep.common.data.loader import validation_batches

    split = ArraySplit(np.arange(23, dtype=np.uint8).reshape(-1, 1, 1, 1), np.arange(23))
    for world_size, global_batch in itertools.product((1, 2, 3, 5), (3, 7, 11)):
        seen = {}
        for rank in range(world_size):
            batches = validation_batches(split, global_batch, rank=rank, world_size=world_size, num_slices=5)
            for index, batch in enumerate(batches):
                assert batch.loss_weight in (0.0, 1 / batch.num_global)
                for one in batch.slices:
                    part = batch.part(one)
                    assert len(part.targets) == max(part.num_samples, 1)
                    seen[index, one.number] = list(part.targets[: part.num_samples])
        for index, start in enumerate(range(0, 23, global_batch)):
            stop = min(start + global_batch, 23)
            for number in range(5):
                assert seen[index, number] == list(range(*rank_slice(start, stop, rank=number, world_size=5)))


def test_a_trial_shows_another_order_in_every_part_of_a_sum():
    """A library whose all-reduce adds in another order must not be taken for one that adds by the tree."""
    one, two, three, four = map(trial, range(4))
    tree = (one + two) + (three + four)
    flushed = np.where(np.abs(one + two) < np.finfo(np.float32).tiny, 0, one + two) + (three + four)
    others = ((one + two) + three) + four, ((two + three) + four) + one, (one + three) + (two + four)
    for begin in range(0, len(tree), SMALLEST_TRIAL // 4):
        part = slice(begin, begin + SMALLEST_TRIAL // 4)
        assert all(np.sum(other[part] != tree[part]) > 10 for other in others if len(tree[part]) > 100)
    assert np.sum(flushed != tree) > 10
