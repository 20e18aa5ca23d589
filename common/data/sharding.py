"""Sharding: the order of samples in an epoch, and which of them each rank takes.

The order is a pseudo-random permutation of range(num_samples) that depends only on (seed, epoch), never on
the number of ranks. It is computed index by index: 10**9 samples need no more memory than 10**5. A global
batch is a range of positions in that order, cut into contiguous slices by rank:

    start, stop = global_batch(position, num_samples, global_batch_size)
    begin, end = rank_slice(start, stop, rank=rank, world_size=world_size)
    indices = sample_order(np.arange(begin, end), num_samples, seed=seed, epoch=position.epoch)
    position = Position(position.epoch, stop)

Positions count samples, not steps, so the batch size may change within an epoch, and a run may resume in
mid-epoch on another number of ranks.

Under a curriculum, easy samples come first (Bengio et al. 2009; Hacohen and Weinshall 2019). Epochs keep their length:
the first ones repeat only the easiest samples, in a new permutation each time, so that each of them is seen equally
often, give or take one. Later epochs see each sample exactly once, in the same order as a run without a curriculum. The
order depends only on (seed, epoch, position) and the difficulties.
"""

import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.files.npy import read_numbers

# Up to this size the order is one table (512 KiB). A Feistel network over few values needs many rounds until
# all permutations are equally likely, and for a small batch a look-up takes a tenth of the time.
_TABLE_SIZE = 1 << 16
# Positions permuted at once: the work arrays, below 300 KiB, stay in the cache of one core.
_BLOCK_SIZE = 1 << 13
# Four rounds of truly random functions are enough (Luby and Rackoff 1988), but these are only hashes. The tests
# of shuffle quality, run at 500 samples, reject three to five rounds and accept six and more.
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class Position:
    """Position in the order of samples, from which a run can resume."""

    epoch: int
    """Number of finished epochs."""
    offset: int
    """Number of samples of this epoch that were consumed."""


def check(num_samples: int, global_batch_size: int, *, drop_last: bool = False) -> None:
    """Check that a data set can be cut into batches.

    Raises UserError if there are no samples, the global batch is below 1, or `drop_last` leaves no step as the global
    batch is larger than the data set.
    """
    if num_samples < 1:
        raise UserError(f"expected at least 1 sample, received {num_samples}: look into the data directory")
    if global_batch_size < 1:
        raise UserError(f"expected a global batch size of at least 1, received {global_batch_size}: raise it")
    if drop_last and global_batch_size > num_samples:
        raise UserError(
            f"expected a global batch size of at most {num_samples}, all samples, as incomplete batches are "
            f"dropped, received {global_batch_size}: lower it or keep incomplete batches"
        )


def global_batch(
    position: Position, num_samples: int, global_batch_size: int, *, drop_last: bool = False
) -> tuple[int, int] | None:
    """Return the next global batch as positions [start, stop) of the epoch's order, or None at the epoch's end.

    The position after a batch is Position(position.epoch, stop); at an epoch's end it is Position(position.epoch + 1,
    0). Raises UserError as `check` does.
    """
    check(num_samples, global_batch_size, drop_last=drop_last)
    start, stop = position.offset, min(position.offset + global_batch_size, num_samples)
    if stop - start < (global_batch_size if drop_last else 1):
        return None
    return start, stop


def rank_slice(start: int, stop: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return this rank's slice [begin, end) of the global batch [start, stop).

    The slices of ranks 0, 1, 2, ... are adjacent, and their sizes differ by at most one sample. With fewer
    samples than ranks some slices are empty (begin == end). A mean over the batch must weight the slices by
    their sizes.
    """
    size = stop - start
    return start + size * rank // world_size, start + size * (rank + 1) // world_size


def sample_order(positions: np.ndarray, num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the samples at the given positions of an epoch's order: indices, int64, as many as positions.

    Over all positions this is a permutation of range(num_samples). Checkpoints rely on it: the same arguments give the
    same samples in every version. Raises IndexError if a position is not in [0, num_samples), UserError if there are no
    samples.

    Args:
        positions: integers in [0, num_samples), one-dimensional, in any order.
        num_samples: number of samples in the data set, at most 2**62.
        seed: any integer.
        epoch: any integer.
    """
    check(num_samples, 1)
    if positions.size and not 0 <= positions.min() <= positions.max() < num_samples:
        raise IndexError(f"positions must lie in [0, {num_samples})")
    if num_samples <= _TABLE_SIZE:
        return _sorted_order(num_samples, seed, epoch)[positions]
    permutation = _Feistel(num_samples, seed, epoch)
    samples = np.empty(positions.size, np.int64)
    for begin in range(0, positions.size, _BLOCK_SIZE):
        block = samples[begin : begin + _BLOCK_SIZE].view(np.uint64)
        np.copyto(block, positions[begin : begin + _BLOCK_SIZE], casting="unsafe")
        permutation.apply(block)
        while (outside := np.flatnonzero(block >= np.uint64(num_samples))).size:
            walking = block[outside]
            permutation.apply(walking)
            block[outside] = walking
    return samples


def _key(num_samples: int, seed: int, epoch: int, num_bytes: int) -> bytes:
    # A cryptographic hash makes neighbouring seeds and epochs independent, and never changes between versions.
    return hashlib.shake_256(f"allstep {num_samples} {seed} {epoch}".encode()).digest(num_bytes)


@functools.lru_cache(maxsize=2)
def _sorted_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Return the whole order of a small data set, int64 (num_samples,), by sorting random 64-bit numbers.

    This is the "prefix cipher" of Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 3.
    """
    numbers = np.frombuffer(_key(num_samples, seed, epoch, 8 * num_samples), "<u8")
    return np.argsort(numbers, kind="stable")


class _Feistel:
    """Keyed permutation of range(2**low_bits * num_high), the smallest such range that holds num_samples.

    A value is split into high * 2**low_bits + low, and the rounds alternately add a hash of one half to the
    other: the generalised Feistel network of Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
    section 5. The addition is modulo the half's size; the classical network uses XOR and so makes only even
    permutations. Values of num_samples and above are permuted again until they fall below ("cycle walking",
    section 4 there). There are fewer than 2**low_bits of them, about the square root of num_samples.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        self.low_bits = (num_samples - 1).bit_length() // 2
        self.num_high = -(-num_samples >> self.low_bits)
        self.keys = np.frombuffer(_key(num_samples, seed, epoch, 8 * _NUM_ROUNDS), "<u4").reshape(-1, 2)

    def apply(self, values: np.ndarray) -> None:
        """Permute `values`, uint64 (n,), in place."""
        low_mask, num_high = np.uint32((1 << self.low_bits) - 1), np.uint32(self.num_high)
        low = values.astype(np.uint32)
        low &= low_mask
        values >>= np.uint64(self.low_bits)
        high = values.astype(np.uint32)
        mixed, scratch = np.empty_like(low), np.empty_like(low)
        for number, key in enumerate(self.keys):
            if number % 2 == 0:
                _hash(high, key, mixed, scratch)
                mixed >>= np.uint32(32 - self.low_bits)
                low += mixed
                low &= low_mask
            else:
                _hash(low, key, mixed, scratch)
                # From [0, 2**32) to [0, num_high) without a division: Lemire 2019, "Fast Random Integer
                # Generation in an Interval", section 4.
                np.multiply(mixed, num_high, out=values, dtype=np.uint64)
                values >>= np.uint64(32)
                np.add(high, values, out=high, dtype=np.uint32, casting="unsafe")
                # Modulo num_high without a division: below it, the difference wraps round to a large number.
                np.subtract(high, num_high, out=scratch)
                np.minimum(high, scratch, out=high)
        np.copyto(values, high)
        values <<= np.uint64(self.low_bits)
        values |= low


def _hash(half: np.ndarray, key: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """Compute a keyed hash of uint32 values, of which only the upper bits are well mixed.

    The multipliers and the shift between them are those of "lowbias32" (Wellons 2018, "Prospecting for Hash
    Functions"). Its outer shifts are left out, since they improve the lower bits, which are not used here.
    """
    np.bitwise_xor(half, key[0], out=out)
    out *= np.uint32(0x7FEB352D)
    np.right_shift(out, np.uint32(15), out=scratch)
    out ^= scratch
    out += key[1]
    out *= np.uint32(0x846CA68B)


# Multiples of this are added to the epoch, so that each permutation within an epoch differs from that of any epoch.
_PERMUTATIONS = 2**32


@dataclass(frozen=True)
class Curriculum:
    """Order of the training samples under a curriculum."""

    easiest_first: np.ndarray
    """Indices of all training samples by increasing difficulty, int64 (samples,)."""
    start: float
    """Share of the samples that the first epoch uses."""
    num_epochs: int
    """Number of epochs until all samples are used; the number of samples grows linearly."""

    def num_samples(self, epoch: int) -> int:
        """Return how many samples an epoch uses; epochs count from 0."""
        share = self.start + (1 - self.start) * epoch / self.num_epochs
        return min(math.ceil(share * len(self.easiest_first)), len(self.easiest_first))

    def order(self, positions: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
        """Return the samples at the given positions of an epoch's order, as `sharding.sample_order` does."""
        num_samples = self.num_samples(epoch)
        if num_samples == len(self.easiest_first):
            return sample_order(positions, num_samples, seed=seed, epoch=epoch)
        ranks = np.empty(positions.size, np.int64)
        numbers = positions // num_samples
        for number in np.unique(numbers):
            here = numbers == number
            local_epoch = epoch + int(number) * _PERMUTATIONS
            ranks[here] = sample_order(positions[here] % num_samples, num_samples, seed=seed, epoch=local_epoch)
        return self.easiest_first[ranks]


def curriculum_of(flags: DataConfig, num_samples: int | None) -> Curriculum | None:
    """Return the curriculum of --curriculum, whose file has the difficulties: an .npy array (samples,), or text lines.

    `num_samples` is that of training samples; None if it is not known yet. Raises UserError if the file cannot be read,
    or does not have one finite number per sample.
    """
    path = flags.curriculum
    if path is None:
        return None
    difficulties = read_numbers(path, "--curriculum", "a number for each training sample")
    if num_samples is not None and len(difficulties) != num_samples:
        raise UserError(
            f"expected --curriculum to hold a number for each of {num_samples} training samples, received "
            f"{len(difficulties)} in {quote(path)}; make it by allstep difficulty for this data set"
        )
    return Curriculum(np.argsort(difficulties, kind="stable"), flags.curriculum_start, flags.curriculum_epochs)
