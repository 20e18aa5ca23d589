"""Observes tf.distribute: the workers of MultiWorkerMirroredStrategy."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from allstep.benchmarks.proving.observer.observer import Observer, replace
from allstep.benchmarks.proving.records import World


def install(observer: Observer) -> None:
    """Hook the strategy."""

    def wrap(init: Any) -> Any:
        @functools.wraps(init)
        def observed(strategy: Any, *args: Any, **kwargs: Any) -> None:
            with observer.waiting("MultiWorkerMirroredStrategy"):
                init(strategy, *args, **kwargs)
            rank = strategy.cluster_resolver.task_id or 0
            observer.write(World("tf.distribute", rank, strategy.num_replicas_in_sync, observer.line()))

        return observed

    replace(tf.distribute.MultiWorkerMirroredStrategy, "__init__", wrap)
