"""How TensorFlow computes: which versions of it this is written for, in what precision, and whether always alike."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.cli.strategy_flags import check_version
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.horovod_build import check_built_for

OLDEST, NEWEST = (2, 19), (2, 21)
"""The range of versions, by their first two numbers."""


def prepare(config: TrainConfig) -> None:
    """Configure TensorFlow for a run, before anything computes.

    Raises:
        UserError: this version is outside the range, or Horovod was built for another one.
    """
    check_version("tensorflow", tf.__version__, OLDEST, NEWEST)
    if config.strategy_name == "horovod":
        check_built_for("tensorflow", tf.__version__)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    if config.same_bits:
        keras.utils.set_random_seed(config.data.seed % 2**32)  # without one, what draws numbers is refused
        tf.config.experimental.enable_op_determinism()
