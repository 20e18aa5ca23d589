"""Horovod: one process a GPU or core, gradients averaged by all-reduce where the optimizer applies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import horovod
import keras
import numpy as np
import tensorflow as tf
from horovod.common.elastic import notification_manager
from horovod.tensorflow import allreduce

from allstep.common.cli.strategy_flags import SUM_OF_SLICES, check_horovod, configure_horovod
from allstep.common.launch.devices import check_agreement
from allstep.common.launch.horovod_build import usable_gpus
from allstep.common.training.elastic import form_anew
from allstep.tensorflow import horovod_keras as hvd
from allstep.tensorflow.drop_in.xla import compiled_updates
from allstep.tensorflow.models import trainable_names
from allstep.tensorflow.strategies.batch_norm import synchronise_batch_norm
from allstep.tensorflow.strategies.ordered_sum import Exchange
from allstep.tensorflow.strategies.strategy import Strategy, apply_if, count_overflows


class Horovod(Strategy):
    """The five steps in Horovod."""

    def init(self) -> None:
        self.choose_device()
        configure_horovod(self.placement, self.flags, on_gpu=self.gpu is not None)
        if self.flags.elastic:
            self.placement = form_anew(hvd, notification_manager, self.placement)
        else:
            hvd.init()
        check_horovod(self.placement, self.flags.op, size=hvd.size(), mpi_enabled=hvd.mpi_enabled())
        self.collectives = HorovodCollectives(hvd.rank(), hvd.size())

    def count_gpus(self) -> int:
        return usable_gpus(super().count_gpus(), self._wanted_device, self.placement)

    def pin_device(self) -> str:
        device = super().pin_device()
        check_agreement(
            int(self.collectives.all_gather(np.array([self.gpu is not None], np.int64)).sum()), self.placement
        )
        return device

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        self._names = trainable_names(model)
        if self.flags.sync_batch_norm:
            synchronise_batch_norm(model, sum_over_ranks)
        if self.flags.slices:
            return model, optimizer
        compression = hvd.Compression.fp16 if self.flags.compression == "fp16" else hvd.Compression.none
        op = {"average": hvd.Average, "sum": hvd.Sum, "adasum": hvd.Adasum}[self.flags.op]
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, op=op)
        if self.flags.compile:
            optimizer.apply = compiled_updates()(optimizer.apply)
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    def apply_unscaled(
        self,
        optimizer: keras.Optimizer,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[keras.Variable],
        loss_scale: tf.Tensor,
    ) -> tf.Tensor:
        if self.flags.slices:
            return super().apply_unscaled(optimizer, gradients, variables, loss_scale)
        # Reduced as they are: what overflows in a compressed sum overflows on all ranks.
        reduced = optimizer.reduce(gradients, variables)
        overflow = count_overflows(reduced)
        apply_if(overflow, lambda: optimizer.apply_reduced([gradient / loss_scale for gradient in reduced], variables))
        return overflow

    def _exchange(self) -> Exchange | None:
        return HorovodExchange(keeps_order=self.gpu is None) if hvd.size() > 1 else None

    def pending_tensors(self) -> Sequence[str]:
        if self.flags.slices:
            return (SUM_OF_SLICES,)
        return self._names  # they travel as a group, so who waits for one waits for all

    def versions(self) -> dict[str, str]:
        return {"horovod": horovod.__version__}


def sum_over_ranks(tensor: tf.Tensor, name: str) -> tf.Tensor:
    """The sum of `tensor` over all ranks."""
    summed = allreduce(tensor, op=hvd.Sum, name=f"allstep.{name}", ignore_name_scope=True)
    return cast("tf.Tensor", summed)  # of tensors Horovod makes tensors, though it does not say so


@dataclass(frozen=True)
class HorovodExchange:
    """Of the gradients of slices; see `ordered_sum.Exchange`."""

    keeps_order: bool
    """MPI and Gloo choose a way by size; NCCL may measure first."""
    in_graph = True

    def all_to_all(self, sent: tf.Tensor, received_sizes: Sequence[int]) -> tf.Tensor:
        return cast("tf.Tensor", hvd.alltoall(sent, name="allstep.slices"))  # without splits it gives no sizes

    def all_gather(self, part: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(part, name="allstep.sum_of_slices")

    @tf.function(autograph=False)  # outside of a function TensorFlow gives operations names of its own
    def all_reduce(self, vector: tf.Tensor) -> tf.Tensor:
        return sum_over_ranks(vector, "slices")


@dataclass(frozen=True)
class HorovodCollectives:
    """Collectives of Horovod's global process set."""

    rank: int
    world_size: int

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(hvd.allreduce(values, op=hvd.Sum, name="allstep.sum"))

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(hvd.allgather(values[np.newaxis], name="allstep.gather"))

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray], root: int = 0) -> dict[str, np.ndarray]:
        return {name: np.asarray(hvd.broadcast(array, root, name=f"allstep.{name}")) for name, array in arrays.items()}

    def barrier(self) -> None:
        self.all_reduce_sum(np.zeros(1))  # horovod.tensorflow has no barrier
