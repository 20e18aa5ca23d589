"""Observes Keras' fit: its epochs, which end when enough was seen of them, and where it waits for other ranks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.commands.prove.observer.observer import Observer, replace
from allstep.commands.prove.observer.values import digest
from allstep.commands.prove.records import Held, Resumed, Waiting

_PLACES = (0, 0.5, 1)
"""Of samples that are looked at: the first, one in the middle, the last."""


class Watch(keras.callbacks.Callback):
    """The last of the callbacks."""

    def __init__(self, observer: Observer, *, may_end_early: bool) -> None:
        super().__init__()
        self._observer = observer
        self._may_end_early = may_end_early
        self._num_batches = 0
        self._has_cut = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._num_batches = 0
        self._observer.begin_loop((self.params or {}).get("steps"), may_end_early=self._may_end_early)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observer.write(Waiting("a step of fit", self._observer.line(), computes=True))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._observer.write(Resumed())
        self._num_batches += 1
        if self._observer.is_enough:
            self._observer.stop()
        if self._num_batches >= self._observer.max_batches:
            self._stop_training(True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._has_cut:
            self._stop_training(False)

    def _stop_training(self, stops: bool) -> None:
        """Fit ends the epoch where this is set after a batch, and the training where it is set after the epoch."""
        assert self.model is not None  # fit has set it
        self._has_cut = self.model.stop_training = stops


def _held(inputs: Any) -> Held | None:
    """What an array of samples holds in three places; None of what is none."""
    if not (isinstance(inputs, np.ndarray) or tf.is_tensor(inputs)) or len(inputs) < len(_PLACES):
        return None
    digests = tuple(digest(np.asarray(inputs[int(placement * (len(inputs) - 1))])) for placement in _PLACES)
    return Held(digests) if len({*digests}) == len(_PLACES) else None


def install(observer: Observer) -> None:
    """Hook fit."""

    def wrap(fit: Any) -> Any:
        signature = inspect.signature(fit)

        @functools.wraps(fit)
        def observed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments.get("callbacks")
            watch = Watch(observer, may_end_early=bound.arguments.get("steps_per_epoch") is not None)
            if held := _held(bound.arguments.get("x")):
                observer.write(held)
            if isinstance(given, keras.callbacks.CallbackList):
                given.callbacks.append(watch)
                watch.set_params(given.params)
                watch.set_model(args[0])
            else:
                own = given if isinstance(given, (list, tuple)) else [given] if given else []
                bound.arguments["callbacks"] = [*own, watch]
            observer.is_in_fit = True
            try:
                return fit(*bound.args, **bound.kwargs)
            finally:
                observer.is_in_fit = False

        return observed

    owner = next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))
    replace(owner, "fit", wrap)
