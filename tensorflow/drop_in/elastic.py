"""Horovod's elastic training for Keras 3, with the names and arguments of `horovod.tensorflow.keras.elastic`.

    @hvd.elastic.run
    def train(state):
        state.model.fit(..., callbacks=[hvd.elastic.CommitStateCallback(state), ...])

    train(hvd.elastic.KerasState(model, batch=0, epoch=0))

Under `horovodrun --min-np 2 --host-discovery-script FILE`, training goes on from the last commit when a rank is lost,
and at the next commit when hosts join or leave.
"""

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from allstep.common.process.exit import is_consequence
from allstep.tensorflow.drop_in.collectives import broadcast_variables, native
from allstep.tensorflow.drop_in.optimizer import lasting_state
from allstep.tensorflow.drop_in.replicas import is_built


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function(state, ...)` again, from the last committed state, when ranks are lost or hosts change.

    The first argument is a `KerasState`, or another of Horovod's states. `function` must resume training from it, and
    must not communicate before that, because ranks that join would not do so.
    """

    @functools.wraps(function)
    def naming_lost_ranks(state, *args, **kwargs):
        try:
            return function(state, *args, **kwargs)
        except tf.errors.OpError as error:  # in a graph, Horovod's errors become TensorFlow's
            if is_consequence(error):
                raise HorovodInternalError(str(error)) from error
            raise

    return run_fn(naming_lost_ranks, _reset)


def _reset() -> None:
    hvd.shutdown()
    hvd.init()


class KerasState(ObjectState):
    """Committed state of all ranks: the weights of a model, the state of its optimizer, and further attributes.

    model: a built Keras model.
    optimizer: the model's optimizer, by default the one with which it is compiled.
    attributes: further state, such as `batch=0, epoch=0`, read as `state.batch` and sent to ranks that join.

    Raises:
        ValueError: the model has no weights yet.
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **attributes: Any
    ) -> None:
        if not is_built(model):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer: Any = optimizer or model.optimizer
        if not self.optimizer.built:  # slots created later would be neither sent nor restored
            self.optimizer.build(model.trainable_variables)
        self._save_variables()
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **attributes)

    def save(self) -> None:
        """Save the current state in the memory of this rank."""
        self._save_variables()
        super().save()

    def restore(self) -> None:
        """Restore the state that was saved last."""
        for variable, value in zip(self._variables(), self._saved_values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Take the state of rank 0, which is never a rank that has just joined; each rank keeps its random streams."""
        broadcast_variables([*self.model.weights, *lasting_state(self.optimizer)], root_rank=0)
        self._save_variables()
        super().sync()

    def _variables(self) -> list[tf.Variable]:
        return [native(variable) for variable in [*self.model.variables, *lasting_state(self.optimizer)]]

    def _save_variables(self) -> None:
        self._saved_values = [tf.identity(variable) for variable in self._variables()]


class CommitStateCallback(keras.callbacks.Callback):
    """Commit `state` after every `batches_per_commit` batches and after every epoch.

    A commit also checks whether hosts have changed, and ends this `fit` if they have. Put this callback after those
    that update the state.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state: ObjectState = state
        self.batches_per_commit: int = batches_per_commit
        self._num_batches = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._num_batches = 0  # the same on ranks that have just joined

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._num_batches += 1
        if self._num_batches % self.batches_per_commit == 0:
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keep the last trained batch of this epoch in `state.batch`, which is 0 between epochs.

    With `steps_per_epoch`, the first epoch after a loss of ranks is shortened by the batches that were already trained,
    as in Horovod.
    """

    model: keras.Model
    """The model, which Keras sets before it calls any method."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._first_batch = 0
        self._is_shortened = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._first_batch = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self._first_batch + batch
        steps = self.params and self.params.get("steps")
        if self._first_batch and steps and self.state.batch + 1 >= steps:
            self._is_shortened = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.batch = self._first_batch = 0
        if self._is_shortened:  # it has ended the epoch and must not end training
            self._is_shortened = self.model.stop_training = False


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keep the number of complete epochs in `state.epoch`, including those before ranks were lost."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch: int = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
