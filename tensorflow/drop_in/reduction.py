"""Reduction of Keras gradients over ranks by Horovod: dense gradients in groups, sparse ones by gathering rows."""

import functools
import itertools
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import Adasum, Average
from horovod.tensorflow.mpi_ops import ProcessSet

from allstep.common.exact.replica_check import DROP_IN_CHECK
from allstep.tensorflow.drop_in.collectives import native, wire_dtype
from allstep.tensorflow.drop_in.first_steps import SecondStep

Given = tf.Tensor | tf.IndexedSlices
Gradient = Given | None
AnyGradient = TypeVar("AnyGradient", bound=Gradient)
_Reduced = TypeVar("_Reduced")


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """Reduction of gradients over ranks; the fields are the arguments of `DistributedOptimizer`."""

    name: str
    device_dense: str
    device_sparse: str
    compression: type
    sparse_as_dense: bool
    predivide_factor: float
    op: int
    scale: int  # factor of every gradient
    groups: int | list[Any] | None
    process_set: ProcessSet
    scale_local_gradients: bool
    local_variables: set[Any] = field(default_factory=set)  # `tf.Variable.ref()` of variables not shared between ranks
    sparse_variables: set[Any] = field(default_factory=set)  # the same of variables whose gradients were IndexedSlices
    second_step: SecondStep = field(default_factory=SecondStep)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, grads: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """Reduce the gradients of `variables`, in the same order; None stays None."""
        grads = [_scaled(grad, self.scale) for grad in grads]
        local = {i for i, v in enumerate(variables) if self.local_variables and native(v).ref() in self.local_variables}
        shared = {i: grad for i, grad in enumerate(grads) if grad is not None and i not in local}
        # Also on one rank: Adam treats separate rows and their sum differently.
        shared = {
            i: tf.convert_to_tensor(grad) if self.sparse_as_dense or _adds_rows(grad) else grad
            for i, grad in shared.items()
        }
        sparse = {i: grad for i, grad in shared.items() if isinstance(grad, tf.IndexedSlices)}
        dense = {i: grad for i, grad in shared.items() if not isinstance(grad, tf.IndexedSlices)}
        self.sparse_variables.update(native(variables[i]).ref() for i in sparse)
        if not self.process_set.included() or (self._num_ranks() == 1 and not is_elastic()):
            return [shared.get(i, grad) for i, grad in enumerate(grads)]
        if self.scale_local_gradients:
            for i in local:
                grads[i] = _scaled(grads[i], self._share())
        # Without a scope, names are the same on all ranks, independent of Keras' numbering; the checksum distinguishes
        # optimizers of the same class.
        name = f"{self.name}_{zlib.crc32(repr([tuple(grad.shape) for grad in shared.values()]).encode()):08x}"
        with tf.compat.v1.get_default_graph().name_scope(None):
            reduced = _in_turn(name, lambda: self._compare_and_reduce(dense, sparse, variables, name))
        return [reduced.get(i, grad) for i, grad in enumerate(grads)]

    def _num_ranks(self) -> int:
        size = self.process_set.size()
        assert size is not None  # Horovod knows it on ranks in the set
        return size

    def _share(self) -> float | tf.Tensor:
        """Return the weight of one rank in a mean; in an elastic job, it is computed in each step."""
        if is_elastic():
            process_set = self.process_set.process_set_id
            assert process_set is not None  # Horovod is initialised
            return 1.0 / tf.cast(hvd.size_op(process_set), tf.float32)
        return 1.0 / self._num_ranks()

    def _compare_and_reduce(
        self, dense: dict[int, tf.Tensor], sparse: dict[int, tf.IndexedSlices], variables: Sequence[Any], name: str
    ) -> dict[int, Given]:
        shared = [variables[i] for i in dense]
        # The comparisons of two optimizers are eager calls, for which TensorFlow keeps one kernel with one name.
        compare = functools.partial(self.second_step.compare, shared, self.process_set, name)
        is_same = [] if is_elastic() else _in_turn(DROP_IN_CHECK, compare)
        with tf.control_dependencies(is_same):
            return self._reduce(dense, sparse, variables, name)

    def _reduce(
        self, dense: dict[int, tf.Tensor], sparse: dict[int, tf.IndexedSlices], variables: Sequence[Any], name: str
    ) -> dict[int, Given]:
        """Return the reduced gradients by their index."""
        reduced: dict[int, Given] = {}
        for number, group in enumerate(self._grouped(dense, variables)):
            reduced |= zip(group, self._reduce_dense([dense[i] for i in group], f"{name}_{number}"), strict=True)
        return reduced | {i: self._reduce_sparse(grad, f"{name}_sparse_{i}") for i, grad in sparse.items()}

    def _grouped(self, dense: dict[int, tf.Tensor], variables: Sequence[Any]) -> list[list[int]]:
        """Return the groups in which dense gradients are fused, as lists of indices, with one type per group."""
        if self.op == Adasum:  # combines each layer separately (Maleki et al. 2020, section 3.2)
            return [[i] for i in dense]
        if isinstance(self.groups, list):
            index = {native(v).ref(): i for i, v in enumerate(variables)}
            groups = [[index[r] for v in group if (r := native(v).ref()) in index] for group in self.groups]
            groups = [[i for i in group if i in dense] for group in groups]
            groups += [[i] for i in dense if not any(i in group for group in groups)]
        else:
            count = min(self.groups or 1, len(dense))
            bounds = [len(dense) * k // count for k in range(count + 1)] if count else []
            groups = [list(dense)[start:stop] for start, stop in itertools.pairwise(bounds)]
        return [
            [i for i in group if dense[i].dtype == dtype]
            for group in groups
            for dtype in dict.fromkeys(dense[i].dtype for i in group)
        ]

    def _reduce_dense(self, grads: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        dtype = grads[0].dtype
        options = {
            "device_dense": self.device_dense,
            "compression": self.compression,
            "op": self.op,
            "prescale_factor": 1.0 / self.predivide_factor,
            "postscale_factor": self.predivide_factor,
            "process_set": self.process_set,
            "name": name,
            "ignore_name_scope": True,
        }
        sent = [tf.cast(grad, wire_dtype(dtype)) for grad in grads]
        # Horovod's grouped Adasum fails, because it reads an undefined name.
        reduced = [hvd.allreduce(sent[0], **options)] if self.op == Adasum else hvd.grouped_allreduce(sent, **options)
        return [tf.cast(grad, dtype) for grad in cast("list[tf.Tensor]", reduced)]

    def _reduce_sparse(self, grad: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """Gather the rows of all ranks; rows of equal indices are added when they are applied."""
        if self.op == Adasum:
            raise NotImplementedError("Adasum has no sparse form; use sparse_as_dense=True.")
        gather = functools.partial(hvd.allgather, ignore_name_scope=True, process_set=self.process_set)
        with tf.device(self.device_sparse):
            sent, context = self.compression.compress(tf.cast(grad.values, wire_dtype(grad.values.dtype)))
            values = self.compression.decompress(gather(sent, name=f"{name}_values"), context)
            indices = gather(grad.indices, name=f"{name}_indices")
        set_id = self.process_set.process_set_id
        num_ranks = hvd.size_op(set_id or 0) if is_elastic() else self._num_ranks()
        values, indices = _joined(tf.cast(values, grad.values.dtype), indices, num_ranks)
        factor = self._share() if self.op == Average else 1
        return _scaled(tf.IndexedSlices(values, indices, grad.dense_shape), factor)


def _joined(values: tf.Tensor, indices: tf.Tensor, num_ranks: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up gathered rows over ranks if all have rows of the same indices, as an embedding of positions does.

    In one process, each such sum is a single row, and Adam squares rows separately.
    """
    count, per_rank = tf.size(indices), tf.size(indices) // num_ranks
    repeats = tf.reduce_all(indices[per_rank:] == indices[: count - per_rank]) & (per_rank * num_ranks == count)

    def added() -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.concat([[num_ranks, per_rank], tf.shape(values)[1:]], 0)
        return tf.reduce_sum(tf.reshape(values, shape), 0), indices[:per_rank]

    return tf.cond(repeats, added, lambda: (values, indices))


def _adds_rows(grad: Given) -> bool:
    """Return whether a gradient is the sum over its rows of equal indices, as that of a sparse input; graphs tell."""
    if not isinstance(grad, tf.IndexedSlices) or tf.executing_eagerly():
        return False
    origin: Any = grad.values.op
    return any(op.type == "UnsortedSegmentSum" for op in (origin, *(one.op for one in origin.inputs[:1])))


def _in_turn(name: str, reduce: Callable[[], _Reduced]) -> _Reduced:
    """Call `reduce`, whose collectives have this name, while no other call with the name is in flight.

    Two optimizers of the same shapes have the same names, and TensorFlow runs steps in nested `tf.function`s
    concurrently, but one after the other if both change the same variable.
    """
    if tf.executing_eagerly():
        return reduce()
    turn = _turn(name)
    with tf.control_dependencies([turn.assign_add(1)]):
        reduced = reduce()
    with tf.control_dependencies(tf.nest.flatten(reduced, expand_composites=True)):
        turn.assign_add(1)
    return reduced


@functools.cache
def _turn(name: str) -> tf.Variable:
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(tf.constant(0, tf.int64), trainable=False)


def _scaled(grad: AnyGradient, factor: float | tf.Tensor) -> AnyGradient:
    if grad is None or (isinstance(factor, (int, float)) and factor == 1):
        return grad
    return cast("AnyGradient", tf.math.scalar_mul(tf.cast(factor, grad.dtype), grad))


def is_elastic() -> bool:
    """Return whether the number of ranks may change under a traced graph, by the variable that Horovod also reads."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))
