"""Objects of all ranks, gathered for comparison, and the words in which a difference is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from allstep.common.exact.replica_check import DROP_IN_CHECK


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
