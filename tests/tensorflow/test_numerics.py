"""Keras settings of a user's environment that change what a network computes. Oracle: the line that refuses them."""

from __future__ import annotations

import keras
import pytest

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import TrainConfig
from allstep.tensorflow.numerics import check_settings, prepare


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("image_data_format", "channels_first", "expected Keras to have channels last .* received channels_first and"),
        ("floatx", "float16", "floats of 32 bits, received channels_last and float16; change your file or"),
        ("dtype_policy", "mixed_float16", "the policy float32, which --precision sets, received mixed_float16; leave"),
        ("legacy", "True", "needs Keras 3, and TF_USE_LEGACY_KERAS makes tf.keras another one; unset it"),
    ],
)
def test_other_settings_are_refused(setting, value, line, monkeypatch):
    before = keras.config.image_data_format(), keras.config.floatx(), keras.config.dtype_policy()
    if setting == "legacy":
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", value)
    else:  # as keras.json has it
        getattr(keras.config, f"set_{setting}")(value)
    try:
        with pytest.raises(UserError, match=line):
            prepare(TrainConfig()) if setting == "legacy" else check_settings("float32")
    finally:
        keras.config.set_image_data_format(before[0])
        keras.config.set_floatx(before[1])
        keras.config.set_dtype_policy(before[2])
