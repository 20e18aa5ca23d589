"""Version of TensorFlow, and settings of its precision and determinism."""

from __future__ import annotations

import keras
import tensorflow as tf

from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.framework_version import check_version
from allstep.common.launch.horovod_build import check_built_for


def prepare(config: TrainConfig) -> None:
    """Configure TensorFlow for a run, before any computation.

    Raises:
        UserError: the version is older than the tested ones, or Horovod was built for another version.
    """
    check_version("tensorflow", tf.__version__)
    if config.strategy_name == "horovod":
        check_built_for("tensorflow", tf.__version__)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    if config.same_bits:
        keras.utils.set_random_seed(config.data.seed % 2**32)  # else random operations would fail
        tf.config.experimental.enable_op_determinism()
