"""The sum of the slices' vectors over all ranks in one fixed order, and the devices on which slices are computed.

`common/data/slices.py` says in which order, and how.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from allstep.common.data.slices import Node, SumPlan
from allstep.tensorflow.compat import undivided_losses


def add(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Return the sum of two vectors.

    On a CPU NumPy adds them, because TensorFlow's kernels flush subnormal numbers to 0, unlike all-reduces.
    """
    if "GPU" in first.device:
        return first + second
    return tf.convert_to_tensor(np.add(host_array(first), host_array(second)))


def host_array(tensor: tf.Tensor | tf.Variable) -> np.ndarray:
    """Return a tensor's values, on a CPU without the copy that `numpy()` makes."""
    return np.asarray(memoryview(tf.convert_to_tensor(tensor)))  # pyright: ignore[reportArgumentType]


class Exchange(Protocol):
    """Operations on vectors over all ranks."""

    @property
    def keeps_order(self) -> bool:
        """Whether the order of `all_reduce` depends on the size of a vector alone."""
        ...

    @property
    def in_graph(self) -> bool:
        """Whether `all_reduce` can be called inside a TensorFlow function."""
        ...

    def all_to_all(self, sent: tf.Tensor, received_sizes: Sequence[int]) -> tf.Tensor:
        """Return the elements that each rank has sent to this one, in the order of ranks.

        `sent` is cut into equal parts for rank 0, rank 1, ...
        """
        ...

    def all_gather(self, part: tf.Tensor) -> tf.Tensor:
        """Return the parts of all ranks, which have the same size, in the order of ranks."""
        ...

    def all_reduce(self, vector: tf.Tensor) -> tf.Tensor:
        """Return the sum of the ranks' vectors, added in any order."""
        ...


class OrderedSum(SumPlan):
    """Sum over the slices of all ranks, with the same bits on every rank and on any number of ranks."""

    _exchange: Exchange | None

    def __call__(self, partial: Mapping[Node, tf.Tensor]) -> tf.Tensor:
        """Return the sum over all slices; `partial` is this rank's `TreeSum.partial`: vectors of one size, padded."""
        if self._exchange is None:
            return partial[0, self.num_slices]
        own = [partial[node] for node in self.nodes[self.rank]]
        size = own[0].shape.num_elements()
        if self._is_in_order(self._exchange, size):
            return self._exchange.all_reduce(own[0])
        part_size = size // self.world_size
        # Each rank gets its part of all of this rank's sums.
        sent = own[0]
        if len(own) > 1:
            sent = tf.reshape(tf.stack([tf.reshape(one, (self.world_size, -1)) for one in own], 1), [-1])
        received = self._exchange.all_to_all(sent, [len(nodes) * part_size for nodes in self.nodes])
        parts = tf.split(received, sum(map(len, self.nodes)))
        return self._exchange.all_gather(self.add_up(parts, add))

    def within_a_step(self, size: int) -> Callable[[tf.Tensor], tf.Tensor] | None:
        """Return the function that adds up the ranks' sums, of `size` elements, inside a TensorFlow function, or None.

        All ranks call it.
        """
        exchange = self._exchange
        return exchange.all_reduce if exchange and exchange.in_graph and self._is_in_order(exchange, size) else None

    def _is_in_order(self, exchange: Exchange, size: int) -> bool:
        def all_reduce(array: np.ndarray) -> np.ndarray:
            return exchange.all_reduce(tf.constant(array)).numpy()

        return self.is_in_order(size, all_reduce if exchange.keeps_order else None)


SliceFunction = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""Takes inputs, targets and the weight of their losses; returns a vector."""
Numbers = dict[str, tf.Tensor]
"""Fields of a `StepResult`, added up over the devices of this process."""


class SliceDevices:
    """Devices of a process, here a single one. Methods are called in a compiled step."""

    number: int = 1

    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Return what `function` returns for a slice on each device; `bounds` (number, 2) has the samples of each."""
        begin, end = tf.unstack(bounds[0])
        return [function(inputs[begin:end], targets[begin:end], loss_weight)]

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        """Return the sums of what `function` returns on every device."""
        return function()


class ReplicaDevices(SliceDevices):
    """Devices of a strategy of tf.distribute."""

    def __init__(self, strategy: tf.distribute.Strategy, number: int) -> None:
        self.strategy, self.number = strategy, number

    @undivided_losses()
    def on_slices(
        self, function: SliceFunction, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, bounds: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        def on_device() -> tf.Tensor:
            device = tf.distribute.get_replica_context().replica_id_in_sync_group
            begin, end = tf.unstack(bounds[device % self.number])
            return function(inputs[begin:end], targets[begin:end], loss_weight)

        return self.strategy.experimental_local_results(self.strategy.run(on_device))

    def on_every(self, function: Callable[[], Numbers]) -> Numbers:
        results = self.strategy.run(function)
        return tf.nest.map_structure(lambda value: tf.add_n(self.strategy.experimental_local_results(value)), results)
