"""Curriculum learning: easy samples first (Bengio et al. 2009; Hacohen and Weinshall 2019).

Epochs keep their length, so a run's position stays two integers. The first epochs repeat only the easiest samples, in a
new permutation each time, so that each of them is seen equally often, give or take one. Later epochs see each sample
exactly once, in the same order as a run without a curriculum. The order depends only on (seed, epoch, position) and the
difficulties, never on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from allstep.common.base.errors import UserError, quote
from allstep.common.config.data_config import DataConfig
from allstep.common.data.sharding import sample_order
from allstep.common.files.npy import read_numbers

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
