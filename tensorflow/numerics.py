"""Supported versions of TensorFlow, and settings of its precision and determinism."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.cli.strategy_flags import check_version
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.horovod_build import check_built_for

OLDEST, NEWEST = (2, 19), (2, 21)
"""Range of supported versions (major, minor)."""


def prepare(config: TrainConfig) -> None:
    """Configure TensorFlow for a run, before any computation.

    Raises:
        UserError: the version is outside the range, or Horovod was built for another version.
    """
    check_version("tensorflow", tf.__version__, OLDEST, NEWEST)
    if config.strategy_name == "horovod":
        check_built_for("tensorflow", tf.__version__)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    if config.same_bits:
        keras.utils.set_random_seed(config.data.seed % 2**32)  # else random operations would fail
        tf.config.experimental.enable_op_determinism()
