"""A moving average of the weights, for validation and for checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras

from allstep.tensorflow.strategies.strategy import Strategy


class WeightAverage:
    """a = w after the first step, a = decay * a + (1 - decay) * w after each other one (Polyak and Juditsky 1992).

    Keras' optimizers keep it. `pytorch/averaging.py` has the same. Running statistics of batch norms are not averaged:
    they are averages.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], averages: Sequence[keras.Variable], strategy: Strategy
    ) -> None:
        """`averages` are the optimizer's, in the order of the `variables`."""
        self._variables, self.averages, self._strategy = variables, averages, strategy

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within it the network has the averages, and they are where its weights were."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for variable, average in zip(self._variables, self.averages, strict=True):
            kept, *_ = self._strategy.replicas(variable)
            kept = kept.copy()  # which may be the variable's own memory
            variable.assign(self._strategy.replicas(average)[0])
            average.assign(kept)
