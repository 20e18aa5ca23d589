"""One process, one device: what every other strategy has to equal."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from allstep.common.config import StrategyConfig
from allstep.common.launcher import Placement, gpu_of_rank, threads_per_rank
from allstep.common.memory import keep_freed_memory


class Single:
    """The five steps without other ranks. The other strategies override what they do differently."""

    def __init__(self, place: Placement, flags: StrategyConfig) -> None:
        self.place, self.flags = place, flags
        self.rank = place.rank
        self.world_size = place.world_size

    def init(self) -> None:
        """1. Learn who the others are."""

    def pin_device(self) -> torch.device:
        """2. Take one device, chosen by local rank, and this rank's share of the host's cores."""
        torch.set_num_threads(threads_per_rank(self.place))
        keep_freed_memory()
        if not torch.cuda.is_available():
            return torch.device("cpu")
        number = gpu_of_rank(self.place, torch.cuda.device_count())
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def put(self, network: torch.nn.Module, device: torch.device) -> None:
        """Move the network to this rank's device; strategies that cut it move their part alone, in `wrap`."""
        network.to(device)

    def wrap(
        self, network: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """3. Have gradients averaged over ranks before they are applied.

        Returns: what to call in a training step in place of `network`, and the optimizer.
        """
        return network, optimizer

    def broadcast(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """4. Give every rank the weights and the optimizer state of rank 0."""

    # What a step is made of.

    def a_pass(self, model: torch.nn.Module, *, last: bool) -> contextlib.AbstractContextManager:
        """Around each forward and backward pass of a step; gradients meet in the last one."""
        return contextlib.nullcontext()

    def forward_backward(
        self, model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, loss_weight: float
    ) -> torch.Tensor:
        """Add the gradients of the weighted sum of losses to those of `model`.

        Returns: the sum of the losses of this rank's samples.
        """
        loss_sum = cross_entropy(model(images).float(), labels, reduction="sum")
        (loss_sum * loss_weight).backward()
        return loss_sum.detach()

    def forward(self, model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor | None:
        """Logits of `images`, or None where another rank has them."""
        return model(images)

    # What each rank holds of the state.

    def whole(self, tensor: torch.Tensor) -> np.ndarray:
        """A weight or an optimizer slot; all ranks call it."""
        return tensor.detach().cpu().numpy()

    def part(self, array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """What this rank holds of `array`, as it holds `like`."""
        return torch.from_numpy(array.copy()).to(like.device)

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The whole state on rank 0, of which this rank holds `tensors`; nothing on the others. All ranks call it."""
        arrays = {}
        for name, tensor in tensors.items():
            array = self.whole(tensor)
            if self.place.rank == 0:
                arrays[name] = array
        return arrays

    # What the engine itself says to the other ranks.

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

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that communicate."""
        return {}
