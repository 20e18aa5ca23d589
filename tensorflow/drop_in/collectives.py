"""Horovod's collectives for Keras 3: they take Keras variables, NumPy arrays and Python numbers as well as tensors.

Horovod 0.28.1 names a collective after its tensor, which Keras numbers per process. Here a name depends only on the
position in the list, so a rank may build one more model than the others.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from allstep.common.exact.replica_check import DROP_IN_CHECK

# Horovod has no kernels for these types; each cast is exact in both directions.
_WIRE_DTYPES = {tf.bfloat16: tf.float32, tf.uint32: tf.int64}

# Large enough for latency not to matter, small enough to copy.
_BUCKET_BYTES = 64 * 2**20


def native(value: Any) -> Any:
    """Return the `tf.Variable` of a Keras variable, and any other value unchanged."""
    return value.value if isinstance(value, keras.Variable) else value


def wire_dtype(dtype: tf.DType) -> tf.DType:
    """Return the type in which values of `dtype` are sent: a wider one, exactly converted, if Horovod has no kernel."""
    return _WIRE_DTYPES.get(dtype, dtype)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type = Compression.none,
    *,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """All-reduce one value of the same shape on every rank; `op` defaults to Average. Returns a tensor."""
    reduced = hvd.allreduce(
        _tensor(value),
        average=average,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
        process_set=process_set,
    )
    return cast("tf.Tensor", reduced)  # Horovod's annotations do not tell


def allgather(value: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Concatenate the ranks' values along dimension 0, the only one in which they may differ."""
    return hvd.allgather(_tensor(value), name=name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Return the root rank's value on every rank; the shape must be the same on all of them."""
    return hvd.broadcast(_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int = hvd.Average, *, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Reduce one value over the ranks and return this rank's slice of dimension 0."""
    return hvd.reducescatter(_tensor(value), name=name, op=op, process_set=process_set)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Assign the root rank's values to the variables of all ranks.

    variables: Keras or TensorFlow variables, the same shapes and types in the same order on every rank; names do
        not matter.
    root_rank: the global rank that sends.
    inplace: ignored, and accepted because Horovod has it; values are sent in buckets.

    Small variables share a message, so a network of hundreds of variables takes a few round trips.
    """
    for number, bucket in enumerate(_buckets([native(v) for v in variables])):
        flat = tf.concat([tf.reshape(tf.cast(v, wire_dtype(v.dtype)), [-1]) for v in bucket], axis=0)
        flat = hvd.broadcast(
            flat, root_rank, name=f"broadcast_variables_{number}", ignore_name_scope=True, process_set=process_set
        )
        sizes = [v.shape.num_elements() for v in bucket]
        for variable, part in zip(bucket, tf.split(flat, sizes), strict=True):
            variable.assign(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def _tensor(value: Any) -> tf.Tensor | tf.IndexedSlices:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(native(value))


def _buckets(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Cut the list, type by type, into runs of at most _BUCKET_BYTES (a larger variable is a separate run)."""
    by_dtype: dict[tf.DType, list[tf.Variable]] = {}
    for variable in variables:
        by_dtype.setdefault(wire_dtype(variable.dtype), []).append(variable)
    for dtype, group in by_dtype.items():
        bucket, num_bytes = [], 0
        for variable in group:
            size = variable.shape.num_elements() * dtype.size
            if bucket and num_bytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(variable)
            num_bytes += size
        yield bucket


def gather(value: Any, name: str, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the `value` of each rank of the set, in the order of ranks; it must be serialisable as JSON."""
    name = f"{DROP_IN_CHECK}.{name}"
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = hvd.allgather(tf.constant([len(text)]), name=f"{name}_sizes", process_set=process_set).numpy()
    texts = hvd.allgather(tf.constant(text), name=name, process_set=process_set).numpy()
    return [json.loads(part.tobytes()) for part in np.split(texts, np.cumsum(sizes)[:-1])]


def per_rank(values: Sequence[Any], ranks: Sequence[int] | None = None) -> str:
    """Describe the values of the ranks, equal ones together: "10 on rank 0, 11 on ranks 1 and 2"."""
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        by_value.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {_named(ranks)}" for value, ranks in by_value.items())


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
