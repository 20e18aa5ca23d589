"""Observe Keras' fit: cut its epochs when enough of them was observed, and record where it waits for other ranks."""

import functools
import inspect
from collections.abc import Generator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.epoch_iterator import EpochIterator

from allstep.commands.prove.observer.guarding import Arguments
from allstep.commands.prove.observer.observer import Observer, owner_of, replace
from allstep.commands.prove.observer.values import digest, held
from allstep.commands.prove.records import Held, LoopEnd, Resumed, Waiting


class Watch(keras.callbacks.Callback):
    """Callback that is appended to those of fit."""

    def __init__(self, observer: Observer, *, may_end_early: bool) -> None:
        super().__init__()
        self._observer = observer
        self._may_end_early = may_end_early
        self._loop = self._num_batches = 0
        self._has_cut = False
        for name in ("on_epoch_begin", "on_train_batch_begin", "on_epoch_end", "_note_batch"):
            setattr(self, name, observer.quiet("epochs of fit", getattr(self, name)))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._num_batches = 0
        self._has_cut = False
        self._observer.progress.leave(self._loop)
        params = self.params or {}
        more = {"may_end_early": self._may_end_early, "num_epochs": params.get("epochs") or 0}
        self._loop = self._observer.begin_loop(params.get("steps"), **more).number
        self._observer.progress.enter(self._loop)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._observer.write(Waiting("a step of fit", self._observer.line(), computes=True))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note_batch()
        if self._observer.progress.is_enough:
            self._observer.stop()

    def _note_batch(self) -> None:
        self._observer.write(Resumed())
        self._num_batches += 1
        length = getattr(getattr(self.model, "optimizer", None), "gradient_accumulation_steps", None) or 1
        is_over = self._num_batches >= self._observer.progress.max_steps(self._loop) * length
        if is_over and self._num_batches % length == 0:
            self._has_cut = self._observer.cuts_epoch = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._observer.write(LoopEnd(self._loop, self._num_batches, self._has_cut))


def _held(inputs: Any) -> Held | None:
    """Return digests of samples of an array; None for other inputs, or if many samples are equal."""
    if not (isinstance(inputs, np.ndarray) or tf.is_tensor(inputs)):
        return None
    return held(len(inputs), lambda placement: digest(np.asarray(inputs[placement])))


def install(observer: Observer) -> None:
    """Hook fit, and the iteration over the batches of an epoch (private as of Keras 3.15), to end it early."""

    def wrap_enumerate(enumerate_batches: Any) -> Any:
        @functools.wraps(enumerate_batches)
        def observed(iterator: EpochIterator) -> Any:
            for batch in enumerate_batches(iterator):
                yield batch
                if observer.cuts_epoch:
                    observer.cuts_epoch = False
                    iterator.data_adapter.on_epoch_end()
                    return

        return observed

    observer.watch_scheduler(keras.callbacks.ReduceLROnPlateau, "on_epoch_end")
    replace(EpochIterator, "_enumerate_iterator", wrap_enumerate)
    signatures: list[inspect.Signature] = []
    recorded: list[Held] = []

    def observe(*args: Any, **kwargs: Any) -> Generator[Arguments, Any, None]:
        bound = signatures[0].bind(*args, **kwargs)
        given = bound.arguments.get("callbacks")
        watch = Watch(observer, may_end_early=bound.arguments.get("steps_per_epoch") is not None)
        if not recorded and (first := _held(bound.arguments.get("x"))):  # only the first one is judged
            recorded.append(first)
            observer.write(first)
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks.append(watch)
            watch.set_params(given.params)
            watch.set_model(args[0])
        else:
            own = given if isinstance(given, (list, tuple)) else [given] if given else []
            bound.arguments["callbacks"] = [*own, watch]
        observer.is_in_fit = True
        try:
            yield bound.args, bound.kwargs
        finally:
            observer.is_in_fit = False

    owner = owner_of("fit", keras.Model)
    signatures.append(inspect.signature(owner.fit))
    replace(owner, "fit", observer.around("fit", observe))
