"""A run of which one rank computes a flipped bit in step 3, for `test_audit.py` and `test_bisect.py`.

    python tests/launch/ranks/flipping.py FRAMEWORK RANK WHICH [FLAGS of the trainer]

WHICH of the slices that the rank computes in that step have it: its `own`, or `all`, those of other ranks as well.
Without --slices, which TensorFlow alone can have here, the gradient of the first weight has it.
"""

from __future__ import annotations

import sys

import numpy as np

from allstep.commands.shared.rank import open_session
from allstep.common.process.exit import run_rank

PLANTED = 3


def main() -> None:
    framework, rank, which, *flags = sys.argv[1:]
    session = open_session(framework, flags)
    if session is None:
        return
    if session.placement.rank == int(rank):
        sliced_step = session.worker._sliced_step
        if sliced_step is None:
            flip_in_graph(session.worker)
            session.train()
            return
        compute = sliced_step._slices

        def is_planted(batch) -> bool:
            return session.progress.step + 1 == PLANTED and (which == "all" or batch.read_slice_of)

        def flipped_vectors(batch, loss_scale):
            for number, vector in compute(batch, loss_scale):
                yield number, flip(vector) if is_planted(batch) else vector

        def flipped_buckets(batch, one_pass, give):
            def give_flipped(number, bucket, vector):
                give(number, bucket, flip(vector) if bucket == 0 and is_planted(batch) else vector)

            compute(batch, one_pass, give_flipped)

        sliced_step._slices = flipped_buckets if framework == "pytorch" else flipped_vectors
    session.train()


def flip_in_graph(worker) -> None:
    import tensorflow as tf

    compute = worker._one_pass

    def flipped(*arguments):
        loss_sum, (first, *others) = compute(*arguments)
        flips = tf.cast(worker._optimizer.num_steps == PLANTED - 1, tf.int32)
        first = tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(first, tf.int32), flips), tf.float32)
        return loss_sum, [first, *others]

    worker._one_pass = flipped


def flip(vector):
    """The lowest bit of one of its gradients."""
    array = np.array(vector.numpy())
    array.view(np.int32)[99] ^= 1
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        return tf.constant(array)
    import torch

    return torch.from_numpy(array)


run_rank(main)
