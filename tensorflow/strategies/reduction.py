"""Reductions of the gradients of all ranks: by a strategy's library, or with --slices in one fixed order."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from allstep.common.cli.strategy_flags import SUM_OF_SLICES
from allstep.tensorflow.compat import MULTI_OPTIMIZER
from allstep.tensorflow.passes import Gradients, on_present

Update = Callable[[Gradients], None]


class Reduction:
    """The gradients of one device, which need no reduction; strategies derive their own from it."""

    is_ordered = False
    """Whether slices are added up in one order, before the gradients come here."""

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.Optimizer,
        compiled: Callable[[Update], Update] = lambda update: update,
    ) -> None:
        """`compiled` returns a function that XLA compiles, or with no --compile the function itself."""
        self.model, self.optimizer, self._compiled = model, optimizer, compiled
        self._variables = model.trainable_variables

    def __call__(self, gradients: Gradients) -> Gradients:
        """Combine the gradients of a device with those of all others; called in a step."""
        return gradients

    def updates(self, update: Update) -> Update:
        """Return the function by which a step calls `update`, which changes weights by combined gradients."""
        return self._compiled(update)

    def apply(self, gradients: Gradients) -> None:
        """Apply combined gradients by the optimizer. Weights without a gradient do not change."""
        self._apply(self.optimizer.apply, gradients)

    def pending_tensors(self) -> Sequence[str]:
        """See `common.training.worker.Worker`."""
        return ()

    def _apply(self, apply: Callable, gradients: Gradients) -> None:
        if isinstance(self.optimizer, MULTI_OPTIMIZER):  # it needs an entry for each weight
            apply(gradients, self._variables)
            return
        present = [pair for pair in zip(gradients, self._variables, strict=True) if pair[0] is not None]
        if present:
            apply(*map(list, zip(*present, strict=True)))


class Ordered(Reduction):
    """--slices: gradients are already summed over all slices by `OrderedSum`, the same under every strategy."""

    is_ordered = True

    def pending_tensors(self) -> Sequence[str]:
        return (SUM_OF_SLICES,)


class ReplicaSums(Reduction):
    """tf.distribute: gradients are added up over all devices of all ranks."""

    names: Sequence[str] = ()
    """Names of the collectives that ranks wait for."""

    def __call__(self, gradients: Gradients) -> Gradients:
        replicas = tf.distribute.get_replica_context()
        assert replicas is not None  # a step runs in one
        return on_present(lambda present: replicas.all_reduce(tf.distribute.ReduceOp.SUM, present), gradients)

    def pending_tensors(self) -> Sequence[str]:
        return self.names
