"""Version of TensorFlow, Keras' settings, and those of precision and determinism."""

import os

import keras
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.common.launch.versions import check_built_for, check_version


def prepare(config: TrainConfig) -> None:
    """Configure TensorFlow for a run, before any computation.

    Raises UserError if the version is older than the tested ones, Horovod was built for another version, or Keras runs
    on another backend.
    """
    if line := wrong_keras():
        raise UserError(line)
    check_version("tensorflow", tf.__version__)
    if config.strategy_name == "horovod":
        check_built_for("tensorflow", tf.__version__)
    tf.config.experimental.enable_tensor_float_32_execution(config.precision == "tf32")
    if config.same_bits:
        keras.utils.set_random_seed(config.data.seed % 2**32)  # else random operations would fail
        tf.config.experimental.enable_op_determinism()


def wrong_keras() -> str | None:
    """Return an error line if Keras does not run on TensorFlow, or `tf.keras` is another Keras; else None."""
    if (backend := keras.backend.backend()) != "tensorflow":
        return f"allstep needs Keras on TensorFlow, it runs on {backend}; set KERAS_BACKEND=tensorflow"
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return "allstep needs Keras 3, and TF_USE_LEGACY_KERAS makes tf.keras another one; unset it"
    return None


def check_settings(*policies: str) -> None:
    """Check the global settings of Keras, which a program, a user's file or keras.json may have changed.

    Raises UserError if the layout or type is not that of the trainers, or the policy of layers is not one of
    `policies`; the first of these is the one that --precision sets.
    """
    found = keras.config.image_data_format(), keras.config.floatx()
    if found != ("channels_last", "float32"):
        raise UserError(
            f"expected Keras to have channels last and floats of 32 bits, received {' and '.join(found)}; change your "
            "file or program, or keras.json in ~/.keras or KERAS_HOME"
        )
    if (policy := keras.config.dtype_policy().name) not in policies:
        raise UserError(
            f"expected Keras to have the policy {policies[0]}, which --precision sets, received {policy}; leave it to "
            "--precision float32, bf16 or fp16"
        )


def check_strategy() -> None:
    """Refuse a strategy that a program or a user's file has entered, before the run enters that of --strategy."""
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise UserError(f"expected no strategy of tf.distribute, received {name}; leave it out, and give --strategy")


def check_graphs() -> None:
    """Refuse functions that run eagerly, since a step would repeat in each call what it must do only when traced."""
    if tf.config.functions_run_eagerly():
        raise UserError("expected TensorFlow to run functions as graphs, received run_functions_eagerly; leave it out")
