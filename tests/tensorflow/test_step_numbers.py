"""Transfer of numbers to and from a step on a GPU, tested on a CPU. Oracle: the numbers."""

from __future__ import annotations

import tensorflow as tf

from allstep.tensorflow.strategies.strategy import PendingNumber, cached_constant, read_later


def test_a_number_that_a_thread_copies_is_the_same():
    assert float(PendingNumber(tf.constant(2.5))) == 2.5
    assert int(PendingNumber(tf.constant(3))) == 3


def test_a_cpu_needs_no_thread():
    number = tf.constant(2.5)
    assert read_later(number) is number


def test_a_number_that_does_not_change_is_copied_once():
    assert cached_constant(0.1) is cached_constant(0.1)
    assert cached_constant(0.1) is not cached_constant(0.2)
    assert cached_constant(0.1).numpy() == tf.constant(0.1, tf.float32).numpy()
