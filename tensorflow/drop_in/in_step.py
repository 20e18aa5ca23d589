"""Base class of Horovod's Keras callbacks, which keeps the replicas in step."""

from typing import Any

import keras

from allstep.tensorflow.drop_in.replicas import check_replicas, refusal


class InStep(keras.callbacks.Callback):
    """Refuses to train replicas that would diverge, and compares them at the end of each epoch.

    `fit_guard` compares them at the start and the end of `fit` as well. Several callbacks of one `fit` compare only
    once: they share their state in the `params` that Keras passes to all. Raises ValueError at the start if the model's
    optimizer is not distributed, RuntimeError if weights or optimizer state differ between ranks (see
    `horovod_replicas`).
    """

    model: keras.Model
    """The model, which Keras sets before it calls any method."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        refuse_undistributed(self.model)
        self._shared()["compared"] = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._compare(f"after epoch {epoch + 1}")

    def _compare(self, moment: str) -> None:
        shared = self._shared()
        if shared["compared"] != moment:
            shared["compared"] = moment
            check_replicas(self.model, shared["local_variables"], moment)

    def _shared(self) -> dict[str, Any]:
        params = self.params
        if params is None:  # in a custom loop
            self.set_params(params := {})
        return params.setdefault("horovod", {"compared": None, "local_variables": set()})


def refuse_undistributed(model: keras.Model) -> None:
    """Raise a ValueError if each rank would train a separate model."""
    if reason := refusal(model):
        raise ValueError(reason)
