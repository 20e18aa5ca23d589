"""MirroredStrategy: one process, a copy of the weights on every device, gradients added up by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from allstep.tensorflow.strategies.distribute import LocalDevices


class Mirrored(LocalDevices):
    """The five steps in tf.distribute.MirroredStrategy; steps 3 and 4 are TensorFlow's."""

    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        return tf.distribute.MirroredStrategy(devices)
