"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

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

    def pin_device(self) -> torch.device:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        torch.set_num_threads(threads_per_rank(self.place))
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if self.place.local_size > torch.cuda.device_count():
            raise UserError(f"expected at most one rank per GPU, received {self.place.local_size} ranks for "
                            f"{torch.cuda.device_count()} GPUs; start fewer ranks or set CUDA_VISIBLE_DEVICES= for CPUs")
        torch.cuda.set_device(self.place.local_rank)
        return torch.device("cuda", self.place.local_rank)

    def wrap(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied."""
        return model, optimizer

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
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
