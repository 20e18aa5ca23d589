"""Trainer in which one rank computes a flipped bit in step 3, for `test_audit.py` and `test_bisect.py`.

    python tests/launch/ranks/flipping.py FRAMEWORK RANK WHICH [FLAGS of the trainer]

WHICH is `own`, to flip it in the rank's slices, or `all`, to flip it also in slices of other ranks that it computes.
Without --slices, which is supported only in TensorFlow, it is flipped in the gradient of the first weight.
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
        step = session.worker._step
        if framework == "tensorflow" and not session.strategy.reduction.is_ordered:
            flip_in_graph(session.worker)
            session.train()
            return
        slices = step.backward if framework == "pytorch" else step.start.__self__
        compute = slices._slices

        def is_planted(batch) -> bool:
            return session.progress.step + 1 == PLANTED and (which == "all" or batch.read_slice_of)

        def flipped_vectors(batch, loss_scale):
            for number, vector in compute(batch, loss_scale):
                yield number, flip(vector) if is_planted(batch) else vector

        def flipped_buckets(batch, one_pass, give):
            def give_flipped(number, bucket, vector):
                give(number, bucket, flip(vector) if bucket == 0 and is_planted(batch) else vector)

            compute(batch, one_pass, give_flipped)

        flipped = flipped_buckets if framework == "pytorch" else flipped_vectors
        object.__setattr__(slices, "_slices", flipped)
    session.train()


def flip_in_graph(worker) -> None:
    import tensorflow as tf

    passes = worker._step.backward
    compute = passes.one_pass

    def flipped(*arguments):
        loss_sum, (first, *others) = compute(*arguments)
        flips = tf.cast(worker._step.optimizer.num_steps == PLANTED - 1, tf.int32)
        first = tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(first, tf.int32), flips), tf.float32)
        return loss_sum, [first, *others]

    object.__setattr__(passes, "one_pass", flipped)


def flip(vector):
    """Flip the lowest bit of one gradient in the vector."""
    array = np.array(vector.numpy())
    array.view(np.int32)[99] ^= 1
    if "tensorflow" in sys.modules:
        import tensorflow as tf

        return tf.constant(array)
    import torch

    return torch.from_numpy(array)


run_rank(main)
