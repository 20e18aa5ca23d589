"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

import keras
import numpy as np

import tensorflow as tf
from allstep.common.config import StrategyConfig
from allstep.common.launcher import Placement, gpu_of_rank, threads_per_rank
from allstep.common.memory import keep_freed_memory


class Single:
    """The five steps without other ranks. The other strategies override what they do differently."""

    name = "single"
    loss_scale = 1.0
    """Factor of a batch's loss weight: 1 where gradients are averaged over ranks, 1 / world_size where added up."""
    steps_in_flight = 1
    """Steps that may be under way before the engine looks at the loss of the first."""

    def __init__(self, place: Placement, flags: StrategyConfig) -> None:
        self.place, self.flags = place, flags
        self.rank, self.world_size = place.rank, place.world_size

    def init(self) -> None:
        """1. Learn who the others are."""

    def pin_device(self) -> str:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        self._share_host()
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            return "/CPU:0"
        gpu = gpus[gpu_of_rank(self.place, len(gpus))]
        tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpu, "GPU")
        return "/GPU:0"  # the only visible one

    def serve(self) -> bool:
        """Whether this rank only computes for another one that trains; returns when that one is gone."""
        return False

    def _share_host(self, *, num_devices: int = 1) -> None:
        keep_freed_memory()
        threads = threads_per_rank(self.place)
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # By default operations that need not wait for each other take all cores of the host, those of other ranks too.
        num_threads = min(threads * num_devices, len(os.sched_getaffinity(0)))
        tf.config.threading.set_inter_op_parallelism_threads(num_threads)

    def scope(self) -> contextlib.AbstractContextManager:
        """Variables of the model and the optimizer are made inside it."""
        return contextlib.nullcontext()

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied."""
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    def start(self, step: Callable, *args: np.ndarray) -> SupportsFloat:
        """Start a compiled training step; `float()` of what it returns waits for the loss."""
        return step(*args)

    def train(self, step: Callable, images: tf.Tensor, labels: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
        """Inside a compiled training step: run `step` on every device of this process, each with its part of the batch.

        Args:
            step: takes images, labels, a factor of what it computes (see `cut`), and the rest.

        Returns: the sum of what the devices return.
        """
        return step(images, labels, 1.0, *rest)

    def evaluate(self, step: Callable, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The same for a step of evaluation."""
        return step(images, labels, 1.0)

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """The variable on each device of this process."""
        return (variable.value,)

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return values[np.newaxis]

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(arrays)

    def barrier(self) -> None:
        pass

    def awaited_tensors(self) -> Sequence[str]:
        return ()

    def metrics(self) -> dict[str, float]:
        """What the strategy measures besides, for the report of the run."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that communicate."""
        return {}


def cut(
    images: tf.Tensor, labels: tf.Tensor, number: int | tf.Tensor, num_parts: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Part `number` of some samples, as `sharding.rank_slice` cuts them.

    Returns: images, labels, and the factor of what is computed with them: 0 where the part is empty and has a sample
    that does not count, since convolutions do not take none; else 1.
    """
    size = tf.shape(labels)[0]
    start, stop = size * number // num_parts, size * (number + 1) // num_parts
    part = slice(start, tf.maximum(stop, start + 1))
    return images[part], labels[part], tf.cast(stop > start, tf.float32)
