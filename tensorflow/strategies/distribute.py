"""Strategies of tf.distribute: their base class, and those of one process, MirroredStrategy and central storage.

A step runs on every device of this process. Gradients are added up over all devices of all ranks by the all-reduce of
the replica context, which Keras 3 calls in an optimizer's `apply`.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from allstep.common.base.collectives import OneRank
from allstep.common.base.errors import UserError
from allstep.tensorflow.compat import (
    global_seed_generator,
    leave_gradients_as_they_are,
    take_new_collective_keys,
    take_seed_generator,
    undivided_losses,
)
from allstep.tensorflow.passes import Gradients, cut, on_present
from allstep.tensorflow.strategies.ordered_sum import ReplicaDevices
from allstep.tensorflow.strategies.reduction import Reduction, ReplicaSums
from allstep.tensorflow.strategies.strategy import Strategy, apply_if, before_tensorflow_starts


class DistributedStrategy(Strategy):
    """Base class of the strategies of tf.distribute; `pin_device` of a subclass creates `strategy`."""

    strategy: tf.distribute.Strategy
    asks_in_loops = False

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.strategy.scope())
            try:
                yield
            except UserError:
                with contextlib.suppress(IndexError):  # the user's network has ended the scope, and is refused for it
                    stack.close()
                raise

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        # The step itself adds up gradients over devices, because it needs the sums.
        leave_gradients_as_they_are(optimizer)
        self.slice_devices = ReplicaDevices(self.strategy, self.num_local_devices)
        return super().wrap(model, optimizer)

    def reduce(self, model: keras.Model, optimizer: keras.Optimizer) -> Reduction:
        return ReplicaSums(model, optimizer)

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. TensorFlow did this when it created the variables."""

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        return self.strategy.experimental_local_results(variable.value)

    def sum_over_ranks(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        replicas = tf.distribute.get_replica_context()
        assert replicas is not None  # a step runs in one
        return replicas.all_reduce(tf.distribute.ReduceOp.SUM, tensor)  # TensorFlow knows sums by their order

    def unless(self, overflow: tf.Tensor, update: Callable[[Gradients], None], gradients: Gradients) -> None:
        present = [one for one in gradients if one is not None]

        def on_device(*present: tf.Tensor) -> None:
            update(on_present(lambda _: present, gradients))

        def update_on_all(strategy: tf.distribute.Strategy, overflow: tf.Tensor, *present: tf.Tensor) -> None:
            # TensorFlow has no condition around collectives of the devices, but one around all devices.
            [first, *_] = strategy.experimental_local_results(overflow)
            apply_if(first, lambda: strategy.extended.call_for_each_replica(on_device, args=present))

        tf.distribute.get_replica_context().merge_call(update_on_all, args=(overflow, *present))

    @undivided_losses()
    def _on_devices(
        self, step: Callable, inputs: tf.Tensor, targets: tf.Tensor, loss_weight: tf.Tensor, *numbers: tf.Tensor
    ) -> tf.Tensor:
        if self.reduction.is_ordered:  # evaluate slices whole, so that no bit depends on the number of devices
            return step(inputs, targets, loss_weight, *numbers)

        with tf.init_scope():  # it makes a variable when it is first asked for, which the graph must not own
            generator = global_seed_generator()

        def on_device() -> tf.Tensor:
            take_seed_generator(generator)
            if self.num_local_devices == 1:
                return step(inputs, targets, loss_weight, *numbers)
            device = tf.distribute.get_replica_context().replica_id_in_sync_group
            return step(*cut(inputs, targets, loss_weight, device, self.num_local_devices), *numbers)

        def joined(value: tf.Tensor) -> tf.Tensor:
            parts = self.strategy.experimental_local_results(value)
            return tf.concat(parts, 0) if parts[0].shape.rank else tf.add_n(parts)

        return tf.nest.map_structure(joined, self.strategy.run(on_device))


class LocalDevices(DistributedStrategy):
    """One process that uses several devices of its host."""

    def init(self) -> None:
        self.choose_device()
        self.collectives = OneRank()

    def pin_device(self) -> str:
        devices = local_devices(self.flags.num_devices)
        self.num_local_devices = len(devices)
        self._share_host(num_devices=len(devices))
        self.strategy = self.make_strategy(devices)
        return devices[0]

    @abstractmethod
    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        """Return the strategy over `devices`, named as in /GPU:0."""


class Mirrored(LocalDevices):
    """MirroredStrategy: a copy of the weights on every device, gradients added up by all-reduce."""

    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        take_new_collective_keys()
        return tf.distribute.MirroredStrategy(devices)


class CentralStorage(LocalDevices):
    """CentralStorageStrategy: the weights are on the CPU, and every device reads them for its part of the batch."""

    def make_strategy(self, devices: Sequence[str]) -> tf.distribute.Strategy:
        return tf.distribute.experimental.CentralStorageStrategy(devices, parameter_device="/CPU:0")

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        # The suite's own batch norm calls them running_mean and running_variance.
        averages = [one.path for one in model.non_trainable_variables if one.name.startswith(("moving_", "running_"))]
        if averages and self.flags.accumulate_steps > 1:
            # Devices agree on running statistics in every pass, which TensorFlow cannot within a loop.
            raise UserError(
                "expected --accumulate-steps 1 for batch norm with --strategy central-storage, received "
                f"{self.flags.accumulate_steps} and {averages[0]}; use mirrored"
            )
        return super().wrap(model, optimizer)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        # All devices share one variable, so TensorFlow has to know how to combine the values that they assign.
        with super().scope(), tf.variable_creator_scope(_aggregated):
            yield


def _aggregated(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
    if options["aggregation"] == tf.VariableAggregation.NONE:
        is_averaged = tf.as_dtype(options["dtype"]).is_floating
        aggregation = tf.VariableAggregation
        options["aggregation"] = aggregation.MEAN if is_averaged else aggregation.ONLY_FIRST_REPLICA
    return create(**options)


def local_devices(num_devices: int | None) -> list[str]:
    """Return the names of the devices to use: the first `num_devices` visible GPUs, or all.

    Without GPUs, the CPU is divided into that many devices. Raises UserError if there are fewer GPUs.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        num_devices = num_devices or 1
        [cpu] = tf.config.list_physical_devices("CPU")
        with before_tensorflow_starts():
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices)
        return [f"/CPU:{number}" for number in range(num_devices)]
    num_devices = num_devices or len(gpus)
    if num_devices > len(gpus):
        raise UserError(
            f"expected --num-devices to be at most the number of GPUs, {len(gpus)}, received {num_devices}; "
            "lower it, or give --device cpu"
        )
    tf.config.set_visible_devices(gpus[:num_devices], "GPU")
    for gpu in gpus[:num_devices]:
        tf.config.experimental.set_memory_growth(gpu, True)
    return [f"/GPU:{number}" for number in range(num_devices)]
