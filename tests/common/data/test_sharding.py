"""Each sample comes once per epoch, whatever the ranks, and the order passes for a fair shuffle.

The statistical tests have fixed seeds: every run gives the same p-values, until the order itself is changed.
"""

from __future__ import annotations

import tracemalloc
from itertools import permutations

import numpy as np
import pytest
import scipy  # scipy.stats is imported when it is used
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.common.base.errors import UserError
from allstep.common.data import sharding
from allstep.common.data.sharding import Position, check, global_batch, rank_slice, sample_order

SIZES_AT_EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 255, 256, 257, 1000, 4095, 4096, 4097]


@pytest.fixture(params=["table", "network"])
def small_order(request, monkeypatch):
    """Return `sample_order`, with small orders computed by table, as usual, or by the network for larger ones."""
    if request.param == "network":
        monkeypatch.setattr(sharding, "_TABLE_SIZE", 0)
    return sample_order


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(sharding, "_TABLE_SIZE", 0)


def whole_order(num_samples: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return sample_order(np.arange(num_samples), num_samples, seed=seed, epoch=epoch)


# ---- each sample exactly once


@st.composite
def runs(draw):
    num_samples = draw(st.integers(1, 300))
    world_sizes = st.integers(1, min(num_samples, 17))
    return {
        "num_samples": num_samples,
        "batch_sizes": draw(st.lists(st.integers(1, 2 * num_samples), min_size=1, max_size=4)),
        "world_sizes": draw(st.lists(world_sizes, min_size=1, max_size=3)),
        "seed": draw(st.integers(-5, 5)),
        "epoch": draw(st.integers(0, 5)),
    }


@given(run=runs())
def test_each_sample_once_an_epoch(run):
    """Oracle: the whole order, and counting; batch size and number of ranks change from step to step."""
    num_samples = run["num_samples"]
    position, seen, step = Position(run["epoch"], 0), [], 0
    while bounds := global_batch(position, num_samples, run["batch_sizes"][step % len(run["batch_sizes"])]):
        world_size = run["world_sizes"][step % len(run["world_sizes"])]
        for rank in range(world_size):
            begin, end = rank_slice(*bounds, rank=rank, world_size=world_size)
            seen.append(sample_order(np.arange(begin, end), num_samples, seed=run["seed"], epoch=position.epoch))
        position, step = Position(position.epoch, bounds[1]), step + 1
    assert np.array_equal(np.concatenate(seen), whole_order(num_samples, seed=run["seed"], epoch=run["epoch"]))
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(num_samples))


@given(st.integers(0, 10**12), st.integers(0, 2000), st.integers(1, 300))
def test_slices_follow_one_another_and_are_even(start, size, world_size):
    """Oracle: the definition of an even partition."""
    slices = [rank_slice(start, start + size, rank=rank, world_size=world_size) for rank in range(world_size)]
    ends = [start, *(end for _, end in slices)]
    assert [begin for begin, _ in slices] == ends[:-1]
    assert ends[-1] == start + size
    sizes = np.diff(ends)
    assert sizes.min() >= 0
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(1, 300), st.integers(1, 400), st.booleans())
def test_batches_of_an_epoch(num_samples, batch_size, drop_last):
    """All batches but the last are complete; with drop_last the last one is too, and less than one batch is missing."""
    if drop_last:
        batch_size = min(batch_size, num_samples)
    batches, position = [], Position(0, 0)
    while bounds := global_batch(position, num_samples, batch_size, drop_last=drop_last):
        batches.append(bounds)
        position = Position(0, bounds[1])
    assert all(stop - start == batch_size for start, stop in batches[: len(batches) if drop_last else -1])
    assert num_samples - position.offset in (range(batch_size) if drop_last else [0])


# ---- the permutation


@pytest.mark.parametrize("num_samples", [*SIZES_AT_EDGES, 65535, 65536, 65537, 100_000])
def test_order_is_a_permutation(small_order, num_samples):
    """Oracle: sorting."""
    order = small_order(np.arange(num_samples), num_samples, seed=3, epoch=1)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(max_examples=50)
@given(st.integers(1, 150_000), st.integers(), st.integers(0, 10**6), st.data())
def test_any_positions_in_any_order(num_samples, seed, epoch, data):
    """Oracle: the whole order, whose internal blocks start at other positions."""
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), max_size=50)), dtype=np.int64)
    expected = whole_order(num_samples, seed=seed, epoch=epoch)[positions]
    assert np.array_equal(sample_order(positions, num_samples, seed=seed, epoch=epoch), expected)


@pytest.mark.parametrize("num_samples", [2, 3, 17, 1000, 65537, 2**32 + 5, 10**12, 2**62])
def test_network_follows_the_paper(network, num_samples):
    """Oracle: the same network, value by value, in Python's unbounded integers, with % and //."""
    low_size = 1 << (num_samples - 1).bit_length() // 2
    high_size = (num_samples + low_size - 1) // low_size
    keys = np.frombuffer(sharding._key(num_samples, 7, 3, 64), "<u4").tolist()

    def mixed(half: int, first: int, second: int) -> int:
        product = (half ^ first) * 0x7FEB352D % 2**32
        return ((product ^ product >> 15) + second) % 2**32 * 0x846CA68B % 2**32

    def permuted(value: int) -> int:
        high, low = divmod(value, low_size)
        for number in range(8):
            round_keys = keys[2 * number : 2 * number + 2]
            if number % 2 == 0:
                low = (low + mixed(high, *round_keys) * low_size // 2**32) % low_size
            else:
                high = (high + mixed(low, *round_keys) * high_size // 2**32) % high_size
        value = high * low_size + low
        return value if value < num_samples else permuted(value)

    positions = np.unique(np.linspace(0, num_samples - 1, 2000).astype(np.int64).clip(0, num_samples - 1))
    expected = [permuted(position) for position in positions.tolist()]
    assert sample_order(positions, num_samples, seed=7, epoch=3).tolist() == expected


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        (10, [4, 2, 1, 7, 8]),
        (65_536, [14558, 53516, 61848, 56492, 45582]),
        (65_537, [57560, 6765, 38476, 62346, 422]),
        (1_281_167, [207141, 360832, 1032428, 1212777, 768407]),
        (10**9, [264638336, 135686959, 907451019, 81818190, 426943317]),
        (2**40, [1037582119174, 187285030726, 648968770431, 775089646305, 841626049585]),
    ],
)
def test_order_is_the_same_for_ever(num_samples, expected):
    """Oracle: values recorded when the order was fixed. A checkpoint in mid-epoch depends on them."""
    positions = np.arange(5) * (num_samples // 5)
    assert sample_order(positions, num_samples, seed=42, epoch=7).tolist() == expected


@pytest.mark.parametrize("num_samples", [1000, 100_000])
def test_seed_epoch_and_size_each_change_the_order(num_samples):
    """Oracle: two random orders agree in one position on average, and hardly ever in more than ten."""
    keys = [(0, 0), (1, 0), (0, 1), (1, 1), (-1, 0)]
    orders = [whole_order(num_samples, seed=seed, epoch=epoch) for seed, epoch in keys]
    orders.append(whole_order(num_samples + 1)[:num_samples])
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert np.count_nonzero(one == other) <= 10


def test_memory_does_not_grow_with_the_data_set():
    """Oracle: tracemalloc, which NumPy reports to: below 1 MiB beyond the answer, at 10**9 samples."""
    positions = np.arange(10**8, 10**8 + 10**6)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        answer = sample_order(positions, 10**9, seed=0, epoch=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before - answer.nbytes < 1 << 20


# ---- shuffle quality


def assert_chance(p_value: float) -> None:
    """Check that the order is neither too unlike a fair shuffle nor too close to it, at one in a thousand for both."""
    assert 0.0005 < p_value < 0.9995


@pytest.mark.parametrize("num_samples", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(num_samples):
    """Oracle: chi-square over the factorial of num_samples classes, odd and even permutations among them."""
    classes = {order: number for number, order in enumerate(permutations(range(num_samples)))}
    orders = [classes[tuple(whole_order(num_samples, epoch=epoch).tolist())] for epoch in range(100 * len(classes))]
    assert_chance(scipy.stats.chisquare(np.bincount(orders, minlength=len(classes))).pvalue)


@pytest.mark.parametrize("vary", ["epoch", "seed"])
@pytest.mark.parametrize("num_samples", [6, 11, 16, 20])
def test_every_sample_is_everywhere_equally_often(num_samples, vary):
    """Oracle: chi-square of the table of samples by positions."""
    orders = np.stack([whole_order(num_samples, **{vary: number}) for number in range(2000)])
    assert_chance(uniformity_of_cells(np.broadcast_to(np.arange(num_samples), orders.shape), orders, num_samples))


def uniformity_of_cells(rows: np.ndarray, columns: np.ndarray, num_bins: int) -> float:
    """Return the p-value of the chi-square test that permutations fill num_bins x num_bins cells uniformly.

    A permutation fills each row and column equally: (num_bins - 1)**2 degrees of freedom, and n / (n - 1)
    times the variance of independent draws (Anderson 1959, "Use of Contingency Tables in the Analysis of
    Consumer Preference Studies").
    """
    num_samples = rows.shape[1]
    cells = np.bincount((rows * num_bins // num_samples * num_bins + columns * num_bins // num_samples).ravel())
    expected = rows.size / num_bins**2
    statistic = ((cells - expected) ** 2 / expected).sum() * (num_samples - 1) / num_samples
    return scipy.stats.chi2.sf(statistic, (num_bins - 1) ** 2)


def orders_of_500(**numbers) -> np.ndarray:
    """Return orders of 500 samples by the network: few enough to reveal a bias that 65,537 samples would hide."""
    [(name, values)] = numbers.items()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_TABLE_SIZE", 0)
        return np.stack([whole_order(500, **{name: value}) for value in values])


@pytest.fixture(scope="module")
def orders_by_epoch():
    return orders_of_500(epoch=range(1500))


@pytest.fixture(scope="module")
def orders_by_seed():
    return orders_of_500(seed=range(1500))


def test_positions_are_uniform(orders_by_epoch):
    """Oracle: chi-square of 50 x 50 blocks of samples and positions."""
    positions = np.broadcast_to(np.arange(500), orders_by_epoch.shape)
    assert_chance(uniformity_of_cells(positions, orders_by_epoch, 50))


@pytest.mark.parametrize("position", [0, 1, 250, 499])
def test_single_positions_are_uniform(position, orders_by_epoch):
    """Oracle: chi-square over 20 ranges of samples."""
    counts = np.bincount(orders_by_epoch[:, position] * 20 // 500, minlength=20)
    assert_chance(scipy.stats.chisquare(counts).pvalue)


@pytest.mark.parametrize("distance", [1, 2, 15, 16, 17, 32, 250])
def test_neighbours_are_uniform(distance, orders_by_epoch):
    """Oracle: chi-square of the differences of samples; the network's lower half has 16 values."""
    differences = (orders_by_epoch[:, distance:] - orders_by_epoch[:, :-distance]) % 500
    assert_chance(scipy.stats.chisquare(np.bincount(differences.ravel(), minlength=500)[1:]).pvalue)


@pytest.mark.parametrize("neighbours", ["orders_by_epoch", "orders_by_seed"])
def test_neighbouring_orders_are_independent(neighbours, request):
    """Oracles: chi-square of 50 x 50 cells; and the number of samples that stay, which is Poisson(1)."""
    orders = request.getfixturevalue(neighbours)
    one, other = orders[:-1:2], orders[1::2]
    assert_chance(uniformity_of_cells(one, other, 50))
    staying = np.minimum((one == other).sum(axis=1), 4)
    expected = len(one) * np.append(scipy.stats.poisson.pmf(range(4), 1), scipy.stats.poisson.sf(3, 1))
    assert_chance(scipy.stats.chisquare(np.bincount(staying, minlength=5), expected).pvalue)


def test_odd_and_even_permutations(orders_by_epoch):
    """Oracle: the binomial test; a network that adds without carry would make only even permutations."""
    odd = sum((500 - num_cycles(order)) % 2 for order in orders_by_epoch[:400])
    assert_chance(scipy.stats.binomtest(odd, 400).pvalue)


def num_cycles(order: np.ndarray) -> int:
    left, count = set(range(len(order))), 0
    while left:
        first = left.pop()
        count, value = count + 1, int(order[first])
        while value != first:
            left.remove(value)
            value = int(order[value])
    return count


# ---- the user's mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0, "global_batch_size": 1}, "at least 1 sample, received 0"),
        ({"num_samples": 9, "global_batch_size": 0}, "global batch size of at least 1, received 0"),
        ({"num_samples": 9, "global_batch_size": -4}, "global batch size of at least 1, received -4"),
        ({"num_samples": 9, "global_batch_size": 10, "drop_last": True}, "at most 9, .* received 10"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        check(**arguments)
    assert "\n" not in str(caught.value)


def test_a_batch_of_nothing_never_loops():
    with pytest.raises(UserError):
        global_batch(Position(0, 0), 10, 0)


@pytest.mark.parametrize("num_samples", [10, 100_000])
@pytest.mark.parametrize("outside", [-1, "num_samples"])
def test_positions_outside_the_epoch(num_samples, outside):
    positions = np.array([0, num_samples if outside == "num_samples" else outside])
    with pytest.raises(IndexError):
        sample_order(positions, num_samples, seed=0, epoch=0)
