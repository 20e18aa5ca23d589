"""Settings that a user's hooks change during training, which Keras' own `fit` would not see either."""

from __future__ import annotations

import os
import signal
import time

import keras
import numpy as np
import pytest
from keras import layers

from allstep.common.base.errors import UserError
from allstep.common.training.hooks import Hook
from allstep.tensorflow import Session

X, Y = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32), np.arange(8) % 3


class Changes(Hook):
    """Hook that calls a function at one moment."""

    def __init__(self, moment, change) -> None:
        setattr(self, moment, lambda session: change())


def freeze(model, optimizer) -> None:
    model.layers[0].trainable = False


def unfreeze(model, optimizer) -> None:
    model.layers[1].trainable = True


def speed_up(model, optimizer) -> None:
    optimizer.learning_rate.assign(7.0)


RATE = "the learning rate 0.1, which the run sets, received 7"
CASES = [
    ("on_start", freeze, "dense.*, frozen by a hook"),
    ("on_step", unfreeze, "dense.*, unfrozen by a hook"),
    ("on_step", speed_up, RATE),
    ("on_epoch", speed_up, RATE),
]


@pytest.mark.parametrize(("moment", "change", "line"), CASES)
def test_what_a_traced_step_would_not_see_is_refused(moment, change, line):
    hidden = layers.Dense(4), layers.Dense(4, trainable=False)
    model, optimizer = keras.Sequential([layers.Input((5,)), *hidden, layers.Dense(3)]), keras.optimizers.SGD(0.1)
    hooks = [Changes(moment, lambda: change(model, optimizer))]
    with pytest.raises(UserError, match=line):
        Session(model, (X, Y), (X, Y), optimizer=optimizer, hooks=hooks, epochs=2, global_batch_size=8).fit()


class EndsTheFirstEpoch(Hook):
    def on_step(self, session) -> None:
        if session.progress.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)  # until this rank is told to stop, after this step


def test_a_run_goes_on_at_the_end_of_an_epoch(tmp_path):
    """Its first moment is then that of the epoch, before any step has set a learning rate."""
    flags = {"optimizer": "sgd", "base_lr": 0.1, "global_batch_size": 8, "output_dir": str(tmp_path), "epochs": 2}
    models = [keras.Sequential([layers.Input((5,)), layers.Dense(3)]) for _ in range(2)]
    Session(models[0], (X, Y), (X, Y), hooks=[EndsTheFirstEpoch()], **flags).fit()
    history = Session(models[1], (X, Y), (X, Y), hooks=[Hook()], resume="latest", **flags).fit()
    assert [epoch["epoch"] for epoch in history] == [1, 2]
