"""Sum vectors in bfloat16 over the ranks at hand; run by test_bf16.py.

    python bf16_sums.py FRAMEWORK

Oracle: the numbers of each rank rounded to bfloat16, added up in float32 and rounded again, by PyTorch in one process.
"""

from __future__ import annotations

import sys

import numpy as np
import torch


def vector(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(size=size).astype(np.float32) * 10.0 ** (rank % 3)


def main(framework: str) -> None:
    if framework == "pytorch":
        import horovod.torch as hvd

        from allstep.pytorch.strategies.horovod_reduction import bf16_sum

        as_tensor, as_array = torch.from_numpy, torch.Tensor.numpy
    else:
        import tensorflow as tf

        from allstep.tensorflow import horovod_keras as hvd
        from allstep.tensorflow.strategies.horovod_reduction import bf16_sum

        as_tensor, as_array = tf.constant, lambda tensor: tensor.numpy()
    hvd.init()
    for size in (1, 2, 3, 1000, 1001):
        for divisor in (1, hvd.size()):
            rounded = [torch.from_numpy(vector(rank, size)).bfloat16().float() for rank in range(hvd.size())]
            expected = (torch.stack(rounded).sum(0) / divisor).bfloat16().float()
            found = as_array(bf16_sum(as_tensor(vector(hvd.rank(), size)), divisor))
            np.testing.assert_array_equal(found, expected.numpy())
    print("as by hand", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
