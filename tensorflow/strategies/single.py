"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

import tensorflow as tf
from allstep.common.errors import UserError
from allstep.common.launcher import Placement, threads_per_rank


class Single:
    """The five steps without other ranks. The other strategies override what they do differently."""

    def __init__(self, place: Placement) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size

    def init(self) -> None:
        """1. Learn who the others are.

        Raises:
            UserError: there are others.
        """
        if self.place.world_size > 1:
            raise UserError(
                f"expected one process for --strategy single, received {self.place.world_size} from "
                f"{self.place.launcher}; they would train {self.place.world_size} times independently: "
                "use --strategy horovod or start one process"
            )

    def pin_device(self) -> str:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(self.place))
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            return "/CPU:0"
        if self.place.local_size > len(gpus):
            raise UserError(f"expected at most one rank per GPU, received {self.place.local_size} ranks for "
                            f"{len(gpus)} GPUs; start fewer ranks or set CUDA_VISIBLE_DEVICES= for CPUs")
        gpu = gpus[self.place.local_rank]
        tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpu, "GPU")
        return "/GPU:0"  # the only visible one

    def wrap(self, model: keras.Model, optimizer: keras.Optimizer) -> tuple[keras.Model, keras.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied."""
        return model, optimizer

    def broadcast(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return values[np.newaxis]

    def broadcast_arrays(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(arrays)

    def barrier(self) -> None:
        pass

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that communicate."""
        return {}
