"""Mean and deviation of a data set's inputs, by which --standardize scales them."""

import dataclasses

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.base.errors import UserError
from allstep.common.data.datasets.base import Dataset, Split

_NUM_PARTS = 64
"""Parts of the samples with sums of their own, each computed by one rank, so that no bit depends on the ranks."""
_READ_AT_ONCE = 4096


def standardized(dataset: Dataset, collectives: Collectives) -> Dataset:
    """Return the data set scaled by the mean and deviation of its training samples, of each field (the last axis).

    Both are those of scikit-learn's StandardScaler; a field that is constant keeps its scale. Collective: each rank
    reads a share of the samples. Raises UserError if the inputs are images or tokens.
    """
    if dataset.input_type == "int64" or (dataset.input_type == "uint8" and len(dataset.input_shape) == 3):
        received = "tokens, which are integers" if dataset.input_type == "int64" else "images"
        raise UserError(f"--standardize needs inputs that are numbers, received {received}; leave it out")
    num_samples, width = len(dataset.train), dataset.input_shape[-1]
    # A row has the number of values of a part, their mean, and the sum of squared differences from it.
    rows = np.zeros((_NUM_PARTS, 3, width))
    for part in range(collectives.rank, _NUM_PARTS, collectives.world_size):
        bounds = num_samples * part // _NUM_PARTS, num_samples * (part + 1) // _NUM_PARTS
        for begin in range(*bounds, _READ_AT_ONCE):
            values = _values(dataset.train, begin, min(begin + _READ_AT_ONCE, bounds[1]), width)
            mean = values.mean(axis=0)
            rows[part] = _merged(
                rows[part], np.stack([np.full(width, len(values)), mean, ((values - mean) ** 2).sum(0)])
            )
    rows = collectives.all_reduce_sum(rows.ravel()).reshape(rows.shape)
    total = np.zeros((3, width))
    for row in rows:
        total = _merged(total, row)
    count, mean, squares = total
    deviation = np.sqrt(squares / count)
    # As in StandardScaler, a difference that rounding may have made is none.
    epsilon = np.finfo(np.float64).eps
    deviation[deviation**2 <= count * epsilon * deviation**2 + (count * mean * epsilon) ** 2] = 1.0
    unit = 255.0 if dataset.input_type == "uint8" else 1.0
    scale = {"mean": tuple((mean / unit).tolist()), "std": tuple((deviation / unit).tolist())}
    return dataclasses.replace(dataset, **scale)


def _values(split: Split, begin: int, end: int, width: int) -> np.ndarray:
    inputs, _ = split.read(np.arange(begin, end), epoch=0)
    return inputs.reshape(-1, width).astype(np.float64)


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the row of two parts together (Chan et al. 1983, "Algorithms for Computing the Sample Variance")."""
    count = one[0] + other[0]
    if not count.any():
        return one
    apart, share = other[1] - one[1], other[0] / count
    return np.stack([count, one[1] + apart * share, one[2] + other[2] + apart**2 * one[0] * share])
