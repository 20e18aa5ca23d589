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
    """Return the line about a Keras that does not run on TensorFlow, or that `tf.keras` is not; None if all is well."""
    if (backend := keras.backend.backend()) != "tensorflow":
        return f"allstep needs Keras on TensorFlow, it runs on {backend}; set KERAS_BACKEND=tensorflow"
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        return "allstep needs Keras 3, and TF_USE_LEGACY_KERAS makes tf.keras another one; unset it"
    return None


def check_settings(*policies: str) -> None:
    """Check what a program, the files of flags or keras.json may have set for all of Keras.

    Raises UserError if layouts or types are not those of the trainers, the policy of layers is none of `policies`, of
    which the first is that of --precision.
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
    """Refuse a strategy that a program or a file of flags has set, before the run sets that of --strategy."""
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise UserError(f"expected no strategy of tf.distribute, received {name}; leave it out, and give --strategy")


def check_graphs() -> None:
    """Refuse functions that run eagerly: what a step does at its first call alone would be done in each of them."""
    if tf.config.functions_run_eagerly():
        raise UserError("expected TensorFlow to run functions as graphs, received run_functions_eagerly; leave it out")
