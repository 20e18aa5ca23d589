"""Horovod's Keras callbacks for Keras 3, with the names and arguments of `horovod.tensorflow.keras.callbacks`."""

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import note
from allstep.tensorflow.derived_state import derive_again
from allstep.tensorflow.drop_in.collectives import allreduce, broadcast_variables, gather, native, per_rank
from allstep.tensorflow.drop_in.optimizer import is_distributed, lasting_state
from allstep.tensorflow.drop_in.rate_callbacks import LearningRateScheduleCallback as LearningRateScheduleCallback
from allstep.tensorflow.drop_in.rate_callbacks import LearningRateWarmupCallback as LearningRateWarmupCallback
from allstep.tensorflow.drop_in.replicas import (
    InStep,
    build_alike,
    is_built,
    optimizers_of,
    rank_local_variables,
    refusal,
    refuse_undistributed,
)


class BroadcastGlobalVariablesCallback(InStep):
    """Start every `fit` from the root rank's weights and the state of the model's optimizers.

    That state is slots, iterations, learning rates, averages and loss scales, of the optimizer that `compile` was given
    and of those that the model holds as attributes. The values are sent before the first batch, or after it if only a
    batch can build the model. State that differs between ranks by design is not sent: random streams (for dropout),
    gradients that are being accumulated, and local variables with their slots.

    root_rank: the rank that sends.
    device: where to put the broadcast; by default TensorFlow decides.
    local_variables: variables not to send, in addition to those that the optimizers know (`register_local_var`).
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        if local_variables is None:
            local_variables = []
        elif isinstance(local_variables, (tf.Variable, keras.Variable)):
            local_variables = [local_variables]
        self.root_rank = root_rank
        self.device = device
        self.local_variables = {native(v).ref() for v in local_variables}
        self._is_pending = self._is_doubtful = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # One rank may have a loaded model and the others new ones; all must broadcast, or fail, at the same moment.
        reason = refusal(self.model)
        moment = allreduce(-1.0 if reason else float(is_built(self.model)), name="are_models_built", op=hvd.Min)
        if moment < 0:
            raise ValueError(reason or "another rank has refused to train a model whose optimizer is not distributed.")
        super().on_train_begin(logs)
        self._shared()["local_variables"] |= self.local_variables
        self._is_pending = not moment
        self._broadcast_first_epoch()
        # Otherwise only the end of the epoch would show whether a user's training step averages gradients.
        self._is_doubtful = not any(map(is_distributed, optimizers_of(self.model)))
        if moment:
            self._broadcast()
        elif hvd.rank() == 0:
            note(
                "this model has weights after its first batch alone, so each rank takes the first step from weights of "
                "its own before those of the root are sent; call the model on a few samples before fit"
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_pending:
            self._is_pending = False
            self._broadcast()
        elif self._is_doubtful:
            self._is_doubtful = False
            self._compare(f"after batch {batch + 1}")

    def _broadcast(self) -> None:
        build_alike(self.model)
        own = rank_local_variables(self.model, self.local_variables)
        state = [v for optimizer in optimizers_of(self.model) for v in lasting_state(optimizer)]
        variables = [*self.model.weights, *state]
        with tf.device(self.device):
            broadcast_variables([v for v in variables if native(v).ref() not in own], self.root_rank)
        derive_again(self.model)

    def _broadcast_first_epoch(self) -> None:
        """Start from the root rank's epoch, which BackupAndRestore may have set there."""
        first = hvd.broadcast(tf.constant(self.model._initial_epoch or 0), self.root_rank, name="initial_epoch")
        self.model._initial_epoch = int(first)


class MetricAverageCallback(InStep):
    """Replace an epoch's metrics by their mean over the ranks.

    Put it before the callbacks that read metrics (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, TensorBoard).
    Every rank must log the same metrics. Ranks count equally, however many samples each has seen. Metrics of several
    values (F1Score) are averaged value by value; what is no number stays as it is.

    device: where to put the all-reduce; by default TensorFlow decides.

    Raises:
        ValueError: ranks have logged different metrics; every rank raises it.
    """

    averages_metrics = True
    """Whether all ranks must log the same metrics, those of validation included."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        logs = {} if logs is None else logs
        values = {name: np.asarray(logs[name]) for name in sorted(logs)}
        values = {name: value.astype(np.float64) for name, value in values.items() if value.dtype.kind in "fiub"}
        self._check_alike({name: list(value.shape) for name, value in values.items()})
        if not values:
            return
        flat = np.concatenate([value.ravel() for value in values.values()])
        with tf.device(self.device):
            means = allreduce(flat, name="average_metrics").numpy()
        parts = np.split(means, np.cumsum([value.size for value in values.values()])[:-1])
        for (name, value), mean in zip(values.items(), parts, strict=True):
            logs[name] = mean.reshape(value.shape) if value.ndim else float(mean[0])

    def _check_alike(self, shapes: dict[str, list[int]]) -> None:
        everyone = gather(shapes, "average_metrics_names")
        if any(other != everyone[0] for other in everyone):
            told = [", ".join(names) or "none" for names in everyone]
            if len(set(told)) == 1:
                told = [", ".join(f"{name} {shape}" for name, shape in names.items()) for names in everyone]
            raise ValueError(
                f"expected the same metrics on all ranks for MetricAverageCallback; received {per_rank(told)}; give "
                "all ranks the same metrics, callbacks and validation data."
            )


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras' ModelCheckpoint with `save_best_only`, written only by rank 0.

    filepath: the file to write; it may also be set as an attribute before training.
    The other arguments are those of ModelCheckpoint. Put it after MetricAverageCallback.
    """

    model: keras.Model
    """The model, which Keras sets before it calls any method."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        # Keras requires a path here, to check its suffix.
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=filepath or f"later{suffix}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,  # pyright: ignore[reportArgumentType] (Keras takes numbers as well)
        )
        if filepath is None:
            self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no `filepath`; pass it or set the attribute before training.")
        refuse_undistributed(self.model)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if hvd.rank() == 0:
            super().on_epoch_end(epoch, logs)
