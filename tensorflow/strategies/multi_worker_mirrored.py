"""MultiWorkerMirroredStrategy: one process a GPU or core, gradients added up by TensorFlow's own all-reduce."""

import functools
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import Fault, UserError
from allstep.common.cli.strategy_flags import many_gradients
from allstep.common.launch import rendezvous, tf_config
from allstep.common.launch.devices import check_agreement
from allstep.tensorflow.models import trainable_names
from allstep.tensorflow.strategies.distribute import DistributedStrategy
from allstep.tensorflow.strategies.ordered_sum import Exchange, add
from allstep.tensorflow.strategies.reduction import Reduction, ReplicaSums


class MultiWorkerMirrored(DistributedStrategy):
    """The five steps in tf.distribute.MultiWorkerMirroredStrategy."""

    name = "multi-worker-mirrored"

    def init(self) -> None:
        if given := os.environ.get("TF_CONFIG"):
            config = tf_config.parse(given, self.name)
            self.placement = tf_config.find_placement(config, self.placement)
            self.choose_device()
        else:
            self.choose_device()
            with rendezvous.free_ports(1) as [port]:
                own = f"{rendezvous.local_host(self.placement)}:{port} {int(self.gpu is not None)}"
                texts = rendezvous.all_gather(own, self.placement)
            addresses, on_gpu = zip(*(text.split() for text in texts), strict=True)
            check_agreement(sum(map(int, on_gpu)), self.placement)
            config = tf_config.TFConfig({"worker": addresses}, "worker", self.placement.rank)
        os.environ["TF_CONFIG"] = config.to_json()
        self.rank_weight = 1 / self.placement.world_size

    def pin_device(self) -> str:
        device = super().pin_device()
        implementation = tf.distribute.experimental.CommunicationImplementation[self.flags.communication.upper()]
        if self.flags.communication == "nccl" and "GPU" not in device:
            raise UserError("expected a GPU with --communication nccl, received none; use ring or auto on CPUs")
        handler = signal.getsignal(signal.SIGTERM)
        self.strategy = _strategy(implementation)
        # TensorFlow catches SIGTERM for a preemption handler; without one, launchers could not end a rank by it.
        signal.signal(signal.SIGTERM, handler)
        if self.strategy.num_replicas_in_sync != self.placement.world_size:
            raise Fault(
                f"{self.placement.launcher or 'no launcher'} says {self.placement.world_size} ranks, "
                f"TensorFlow sees {self.strategy.num_replicas_in_sync}"
            )
        self.collectives = ReplicaCollectives(self.placement.rank, self.placement.world_size, self.strategy)
        return device

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        reduction = ReplicaSums(model, optimizer)
        reduction.names = (f"the all-reduce of {many_gradients(trainable_names(model))}",)
        return reduction

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        variables = [*model.variables, *optimizer.variables]
        values = self.collectives.broadcast_arrays({str(number): v.numpy() for number, v in enumerate(variables)})
        for number, variable in enumerate(variables):
            variable.assign(values[str(number)])

    def _exchange(self) -> Exchange | None:
        world_size = self.placement.world_size
        return ReplicaExchange(self.placement.rank, world_size, self.strategy) if world_size > 1 else None


@functools.cache
def _strategy(
    implementation: tf.distribute.experimental.CommunicationImplementation,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Return TensorFlow's strategy, made once: another would restart a server to which other ranks are speaking."""
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


@dataclass(frozen=True)
class ReplicaExchange:
    """Exchange of the gradients of slices; see `ordered_sum.Exchange`.

    tf.distribute has no all-to-all: every rank gets all that is sent, N / 2 times as much as it needs.
    """

    rank: int
    world_size: int
    strategy: tf.distribute.Strategy
    keeps_order = False
    in_graph = False

    def all_to_all(self, sent: tf.Tensor, received_sizes: Sequence[int]) -> tf.Tensor:
        longest = max(received_sizes) * self.world_size
        padded = tf.pad(sent, [[0, longest - sent.shape.num_elements()]])
        rows = tf.split(self.all_gather(padded), self.world_size)
        return tf.concat([row[size * self.rank :][:size] for row, size in zip(rows, received_sizes, strict=True)], 0)

    def all_reduce(self, vector: tf.Tensor) -> tf.Tensor:
        # Of two ranks. TensorFlow's threads would take what is below the smallest normal number for 0.
        return add(*tf.split(self.all_gather(vector), 2))

    @tf.function(autograph=False)
    def all_gather(self, part: tf.Tensor) -> tf.Tensor:
        return self.strategy.run(lambda: tf.distribute.get_replica_context().all_gather(tf.identity(part), axis=0))


@dataclass(frozen=True)
class ReplicaCollectives:
    """Collectives by the sums of a tf.distribute strategy with one replica a rank."""

    rank: int
    world_size: int
    strategy: tf.distribute.Strategy

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return self._sum(values).numpy()

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        rows = np.zeros((self.world_size, *values.shape), values.dtype)
        rows[self.rank] = values
        return self._sum(rows).numpy()

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        return {name: self._broadcast(array, root) for name, array in arrays.items()}

    def barrier(self) -> None:
        self.all_reduce_sum(np.zeros(1))

    def _broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        # A sum to which the others add nothing; TensorFlow's collectives have no kernels for narrow integers.
        wire = array.astype(np.int64) if array.dtype.kind in "bu" else array
        return self._sum(wire if self.rank == root else np.zeros_like(wire)).numpy().astype(array.dtype)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum(self, values: np.ndarray | tf.Tensor) -> tf.Tensor:
        def on_device() -> tf.Tensor:
            # The identity puts the values on the device; without one TensorFlow does not know where the sum should go.
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(values))

        return self.strategy.run(on_device)
