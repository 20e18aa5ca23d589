"""Guard of `fit`: ranks compare what they are about to do, stop at the same batch, and end with the same weights.

`hooks` puts it around the callbacks of each `fit` with a distributed optimizer, or with a callback of the drop-in.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from allstep.common.base.errors import note
from allstep.common.exact.replica_check import DROP_IN_CHECK
from allstep.tensorflow.drop_in.callbacks import BroadcastGlobalVariablesCallback, InStep, LearningRateScheduleCallback
from allstep.tensorflow.drop_in.collectives import gather, per_rank
from allstep.tensorflow.drop_in.first_steps import is_due, leave_to_guard
from allstep.tensorflow.drop_in.fit_plan import difference, plan_of_fit
from allstep.tensorflow.drop_in.optimizer import Distributed, parts
from allstep.tensorflow.drop_in.reduction import is_elastic
from allstep.tensorflow.drop_in.replicas import (
    check_constants,
    check_replicas,
    is_built,
    optimizers_of,
    shared_statistics,
)


@contextlib.contextmanager
def guarded(model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
    """Guard the `fit` of `model` that runs in the block, by changing its `arguments`."""
    given = arguments.get("callbacks")
    listed = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else _flat(given)
    process_set = _ranks_of_fit(model, arguments, listed)
    with _one_step_an_execution(model, listed):
        if process_set is None:
            yield
            return
        guard = _Guard(model, arguments, listed, process_set)
        around = guard.around(listed)
        if isinstance(given, keras.callbacks.CallbackList):
            given.callbacks = around
            given.set_model(model)
            given.set_params(given.params)
        else:
            arguments["callbacks"] = around
        try:
            with guard.explained(), leave_to_guard():
                yield
        finally:
            if isinstance(given, keras.callbacks.CallbackList):
                given.callbacks = listed


def _flat(callbacks: Any) -> list[Any]:
    return [callback for callback in keras.tree.flatten(callbacks) if callback is not None]


def _ranks_of_fit(model: keras.Model, arguments: Mapping[str, Any], callbacks: list[Any]) -> ProcessSet | None:
    """Return the ranks that take part in this `fit`, or None if there is only this one."""
    if not hvd.is_initialized() or hvd.size() == 1:
        return None
    if any(isinstance(callback, InStep) for callback in callbacks):
        return global_process_set
    # As Horovod's elastic examples have it, one step builds the optimizer before the state is sent.
    builds = (arguments.get("steps_per_epoch"), arguments.get("epochs", 1)) == (1, 1)
    if is_elastic() or (builds and not any(one.built for one in optimizers_of(model))):
        return None
    sets = [
        part._reduction.process_set
        for optimizer in optimizers_of(model)
        for part in parts(optimizer)
        if isinstance(part, Distributed)
    ]
    return next((one for one in sets if one.included() and one.size() != 1), None)


@contextlib.contextmanager
def _one_step_an_execution(model: keras.Model, callbacks: list[Any]) -> Iterator[None]:
    """Let callbacks that set the learning rate of each batch see each batch, whatever `steps_per_execution` is.

    Keras calls callbacks once per execution, so the learning rate would stay behind by up to all its steps.
    """
    rates = [c for c in callbacks if isinstance(c, LearningRateScheduleCallback) and not c.staircase]
    steps = model.steps_per_execution
    if not rates or steps == 1:
        yield
        return
    if not hvd.is_initialized() or hvd.rank() == 0:
        note(
            f"this fit runs one step per execution in place of {steps}, since {type(rates[0]).__name__} sets "
            "the learning rate of each batch; train the epochs after it in another fit to run more at once"
        )
    model.steps_per_execution, model.train_function = 1, None
    try:
        yield
    finally:
        model.steps_per_execution, model.train_function = steps, None


class _Guard:
    """State that the first and the last callback of a `fit` share."""

    def __init__(
        self, model: keras.Model, arguments: Mapping[str, Any], callbacks: list[Any], process_set: ProcessSet
    ) -> None:
        self.model, self.arguments, self.callbacks, self.process_set = model, arguments, callbacks, process_set
        self._may_run_out = self._may_stop_in_epoch = self._is_compared = False
        self._params: dict[str, Any] = {}
        self._num_batches = self._epoch = 0

    def around(self, callbacks: list[Any]) -> list[Any]:
        """Return callbacks with one before and one after them, which guard."""
        first = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.compare_plans(first.params or {}),
            on_epoch_begin=lambda epoch, logs: self.begin_epoch(epoch),
            on_epoch_end=lambda epoch, logs: self.end_batches(),
        )
        last = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: self.compare_start(),
            on_train_batch_end=lambda batch, logs: self.end_batch(batch),
            on_epoch_end=lambda epoch, logs: self.end_epoch(),
            on_train_end=lambda logs: self.end(),
        )
        return [first, *callbacks, last]

    @property
    def _ranks(self) -> list[int]:
        assert self.process_set.ranks is not None  # Horovod knows them on ranks in the set
        return list(self.process_set.ranks)

    def compare_plans(self, params: dict[str, Any]) -> None:
        """Raise a ValueError on all ranks if they are about to run `fit` in different ways."""
        self._params = params
        plan = plan_of_fit(self.model, self.arguments, self.callbacks, params.get("steps"))
        plans = gather(plan, "plans", self.process_set)
        if line := difference(plans, self._ranks):
            raise ValueError(line)
        joins = self.process_set.process_set_id == 0 and not is_elastic()
        self._may_run_out = joins and any(plan["may_run_out"] for plan in plans)
        self._may_stop_in_epoch = any(plan["may_stop_in_epoch"] for plan in plans)
        self._tell_unequal(
            [plan["samples"] for plan in plans], "an epoch has {} samples; ranks count equally in each batch"
        )
        if any(plan["readers"] for plan in plans):
            counts = [plan["validation_samples"] for plan in plans]
            self._tell_unequal(counts, "validation has {} samples or batches; ranks count equally in its averages")
        is_due().assign(True)

    def _tell_unequal(self, counts: list[int | None], line: str) -> None:
        if any(count != counts[0] for count in counts) and hvd.rank() == self._ranks[0]:
            note(f"{line.format(per_rank(counts, self._ranks))}: give all as many")

    def compare_start(self) -> None:
        """Compare what the callbacks have restored or sent: the first epoch, and the model if it is built."""
        built = [is_built(self.model), *(bool(one.built) for one in optimizers_of(self.model))]
        starts = gather([self.model._initial_epoch or 0, built], "start", self.process_set)
        if any(epoch != starts[0][0] for epoch, _ in starts):
            told = per_rank([epoch for epoch, _ in starts], self._ranks)
            raise ValueError(
                f"expected all ranks to go on with the same epoch; received {told}; give BackupAndRestore to rank 0 "
                "alone, before BroadcastGlobalVariablesCallback."
            )
        sends = any(isinstance(callback, BroadcastGlobalVariablesCallback) for callback in self.callbacks)
        if sends and built[0] and all(start[1] == built for start in starts):  # else after the first batch
            self._compare_model("at the start of fit")
            self._is_compared = not shared_statistics(self.model)  # which the first batch may change

    def begin_epoch(self, epoch: int) -> None:
        self._epoch, self._num_batches = epoch, 0

    def end_batch(self, batch: int) -> None:
        """Compare once more after the first batch, and stop where any rank stops."""
        self._num_batches = batch + 1
        if not self._is_compared:
            self._compare_model(f"after batch {batch + 1}")
        if self._may_stop_in_epoch:
            self._stop_together(f"batch {batch + 1} of epoch {self._epoch + 1}", "")

    def end_batches(self) -> None:
        """Raise a ValueError on all ranks if they have seen different numbers of batches in this epoch.

        A rank that has run out joins the steps of the others with zeros until all have.
        """
        if not self._may_run_out:
            return
        hvd.join()
        counts = gather(self._num_batches, "batches", self.process_set)
        if any(count != counts[0] for count in counts):
            raise ValueError(
                f"expected the same number of batches on all ranks in epoch {self._epoch + 1}; received "
                f"{per_rank(counts, self._ranks)}; give all ranks as many samples and the same batch size, or repeat "
                "the data and pass steps_per_epoch."
            )

    def end_epoch(self) -> None:
        self._stop_together(
            f"epoch {self._epoch + 1}", "; put MetricAverageCallback before EarlyStopping, so that all decide alike"
        )

    def end(self) -> None:
        """Compare the weights that this `fit` leaves."""
        self._compare_model("at the end of fit")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Tell the numbers of batches where a step fails because another rank has run out of them."""
        try:
            yield
        except tf.errors.OpError as error:
            if self._may_run_out and "with join" in str(error).lower():
                self._num_batches += 1  # the one that has failed
                self.end_batches()
            raise

    def _compare_model(self, moment: str) -> None:
        self._is_compared = True
        shared = self._params.get("horovod", {})
        check_constants(self.model, moment, self.process_set)
        check_replicas(self.model, shared.get("local_variables", set()), moment)

    def _stop_together(self, moment: str, remedy: str) -> None:
        stops = hvd.allgather(
            tf.constant([int(self.model.stop_training)], tf.uint8),
            name=f"{DROP_IN_CHECK}.stops",
            process_set=self.process_set,
        ).numpy()
        if stops.any() and not stops.all() and hvd.rank() == self._ranks[0]:
            asked = [rank for rank, stop in zip(self._ranks, stops, strict=True) if stop]
            names = f"rank {asked[0]}" if len(asked) == 1 else f"ranks {', '.join(map(str, asked))}"
            note(f"all ranks stop after {moment}, as callbacks of {names} ask{remedy}")
        self.model.stop_training = bool(np.any(stops))
