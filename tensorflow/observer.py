"""What looks at training steps: a trace, the noise scale, a moving average. `pytorch/observer.py` has the same."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from allstep.common.data.loader import Batch
from allstep.common.training.worker import StepResult
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.passes import Gradients


class Observer:
    """Looks at a training step at five moments, of which three are traced. This base class does nothing at any."""

    state: Sequence[tuple[str, CanonicalWeight, keras.Variable]] = ()
    """What a checkpoint keeps of the observer: its name there, its layout and its variable."""

    sees_slices = False
    """Whether it looks at slices, whose vectors then come out of what is traced."""
    measures: Sequence[str] = ()
    """Names of the numbers that `see_pass` returns."""

    def begin(self, batch: Batch, learning_rate: float) -> None:
        """A step begins on this rank's share of a global batch."""

    def see_pass(self, gradients: Gradients, factor: tf.Tensor) -> Mapping[str, tf.Tensor]:
        """Return numbers for the `StepResult` from the gradient of a pass's mean loss times `factor`; traced.

        They are added up over passes and devices.
        """
        return {}

    def see_local(self, gradients: Gradients) -> None:
        """A device has these gradients, added up over its passes; traced."""

    def see_slice(self, number: int, vector: tf.Tensor, *, has_samples: bool) -> None:
        """With --slices: a slice has this vector, of the sum of its losses, its gradients and more."""

    def see_sum(self, vector: tf.Tensor) -> None:
        """With --slices: the vectors of all slices add up to this one."""

    def see_averages(self, gradients: Gradients) -> None:
        """These are the averaged gradients, before anything changes them; traced."""

    def see_updates(self, num_steps: tf.Tensor) -> None:
        """The optimizer has changed the weights, after `num_steps` steps before this one; traced."""

    def numbers(self) -> Mapping[str, tf.Tensor]:
        """Return more numbers for the `StepResult`, once the update was traced; added up over devices."""
        return {}

    def end(self, result: StepResult) -> None:
        """The step is over, with or without an update."""

    def averaged_weights(self) -> contextlib.AbstractContextManager:
        """Within it the network has moving averages, and these are where its weights were."""
        return contextlib.nullcontext()
