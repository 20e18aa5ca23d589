"""What --trace looks at in a step: see `common/trace.py`; `pytorch/step_trace.py` has the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from allstep.common.data.loader import Batch
from allstep.common.trace import OpenRecorder, digest
from allstep.tensorflow.models import CanonicalWeight
from allstep.tensorflow.strategies.strategy import Strategy


class StepTrace:
    """Digests of the steps of a rank, which come slice by slice.

    Looked at are the gradients of each slice before they are added up, their sums, and the weights after the step.
    Gradients at the outputs of layers never leave the compiled pass and are not looked at.
    """

    def __init__(self, weights: Sequence[CanonicalWeight], strategy: Strategy, open_recorder: OpenRecorder) -> None:
        """`weights` have gradients, in the order in which a slice's vector has them, behind its loss."""
        self._weights, self._strategy = weights[::-1], strategy  # backward comes to the last first
        sizes = [weight.variable.value.shape.num_elements() for weight in weights]
        self._bounds = list(pairwise(accumulate(sizes, initial=1)))[::-1]
        self._recorder = open_recorder([], [weight.name for weight in self._weights])
        self._row: np.ndarray | None = None
        self._knows_weights = False

    def begin_step(self, batch: Batch, learning_rate: float) -> None:
        """A step begins on this rank's part of a global batch."""
        self._row = self._recorder.begin(batch, learning_rate)
        if not self._knows_weights:  # later on they are those after the step before
            self._row["weights_before"] = self._digests_of_weights()
            self._knows_weights = True

    def see_slice(self, number: int, vector: np.ndarray) -> None:
        """Look at the vector of a slice."""
        assert self._row is not None
        self._row["local_gradients"][number] = self._digests_of(vector)

    def see_sum(self, vector: np.ndarray) -> None:
        """Look at the sum over all slices."""
        assert self._row is not None
        self._row["reduced_gradients"] = self._digests_of(vector)

    def end_step(self) -> None:
        """Look at the weights after the step, and write all of it."""
        assert self._row is not None
        self._row["weights_after"] = self._digests_of_weights()
        self._recorder.write(self._row)

    def close(self) -> None:
        """Everything is written."""

    def _digests_of(self, vector: np.ndarray) -> list[int]:
        return [digest(vector[begin:end]) for begin, end in self._bounds]

    def _digests_of_weights(self) -> list[int]:
        return [digest(next(iter(self._strategy.replicas(weight.variable)))) for weight in self._weights]
