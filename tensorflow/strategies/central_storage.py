"""CentralStorageStrategy: one process, the weights on the CPU, every device reads them for its part of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from allstep.tensorflow.strategies.distribute import LocalDevices


class CentralStorage(LocalDevices):
    """The five steps in tf.distribute.experimental.CentralStorageStrategy; steps 3 and 4 are TensorFlow's."""

    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        return tf.distribute.experimental.CentralStorageStrategy(devices, parameter_device="/CPU:0")
