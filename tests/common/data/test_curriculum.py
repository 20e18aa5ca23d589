"""The order of a curriculum. Oracles: how often each sample comes; the order without a curriculum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allstep.common.base.errors import UserError
from allstep.common.config.data_config import DataConfig
from allstep.common.data.datasets.base import ArraySplit
from allstep.common.data.loader import train_batches
from allstep.common.data.sharding import Curriculum, Position, curriculum_of, sample_order

NUM_SAMPLES = 103
DIFFICULTIES = np.random.default_rng(0).permutation(NUM_SAMPLES).astype(float)
CURRICULUM = Curriculum(np.argsort(DIFFICULTIES), start=0.2, num_epochs=4)


@pytest.mark.parametrize(("epoch", "share"), [(0, 0.2), (1, 0.4), (2, 0.6), (3, 0.8)])
def test_the_easiest_come_equally_often(epoch, share):
    order = CURRICULUM.order(np.arange(NUM_SAMPLES), seed=3, epoch=epoch)
    num_easy = int(np.ceil(share * NUM_SAMPLES))
    times = np.bincount(order, minlength=NUM_SAMPLES)[np.argsort(DIFFICULTIES)]
    assert (times[num_easy:] == 0).all() and np.ptp(times[:num_easy]) <= 1 and times[:num_easy].min() >= 1
    first, second = order[:num_easy], order[num_easy : 2 * num_easy]
    assert len(second) < num_easy or (sorted(first) == sorted(second) and (first != second).any())


def test_then_it_is_the_order_without_a_curriculum():
    positions = np.arange(NUM_SAMPLES)
    for epoch in (4, 9):
        expected = sample_order(positions, NUM_SAMPLES, seed=3, epoch=epoch)
        np.testing.assert_array_equal(CURRICULUM.order(positions, seed=3, epoch=epoch), expected)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("offset", [0, 41])
def test_any_ranks_and_a_resume_in_mid_epoch_see_the_same_order(world_size, offset):
    split = ArraySplit(np.arange(NUM_SAMPLES)[:, None], np.arange(NUM_SAMPLES))

    def samples(rank: int, ranks: int) -> list[np.ndarray]:
        batches = train_batches(split, Position(1, offset), global_batch_size=lambda _: 10, seed=5, rank=rank,
                                world_size=ranks, sampler=CURRICULUM)  # fmt: skip
        return [batch.targets[: batch.num_samples] for batch in batches]

    [alone] = [np.concatenate(samples(0, 1))]
    per_rank = [
        np.concatenate(parts) for parts in zip(*(samples(n, world_size) for n in range(world_size)), strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(per_rank), alone)
    np.testing.assert_array_equal(alone, CURRICULUM.order(np.arange(offset, NUM_SAMPLES), seed=5, epoch=1))


def test_files(tmp_path):
    array, text = tmp_path / "array.npy", tmp_path / "text"
    np.save(array, DIFFICULTIES.astype(np.float32))
    text.write_text("\n".join(map(str, DIFFICULTIES)))
    for path in (array, text):
        found = curriculum_of(replace(DataConfig(), curriculum=path), NUM_SAMPLES)
        np.testing.assert_array_equal(found.easiest_first, CURRICULUM.easiest_first)
    assert curriculum_of(DataConfig(), NUM_SAMPLES) is None


def pickled(path):
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "write", "told"),
    [
        ("few", lambda path: path.write_text("1\n2\n"), "for each of 103 training samples, received 2"),
        ("words", lambda path: path.write_text("easy\nhard\n"), "could not convert"),
        ("none", lambda path: path.write_text(""), "received 0"),
        ("nan", lambda path: path.write_text("nan\n1\n"), "2 numbers, of which 1 are finite"),
        ("absent", lambda path: None, "No such file"),
        ("table.npy", lambda path: np.save(path, np.zeros((2, 2))), "in 2 axes"),
        ("cut.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01"), "expected --curriculum to be a file"),
        ("pickle.npy", pickled, "expected --curriculum to be a file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(name, write, told, tmp_path):
    write(tmp_path / name)
    with pytest.raises(UserError, match=told) as error:
        curriculum_of(replace(DataConfig(), curriculum=tmp_path / name), NUM_SAMPLES)
    assert len(str(error.value).splitlines()) == 1
