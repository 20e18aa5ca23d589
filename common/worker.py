"""What the engine asks of a framework: the protocol that `pytorch/worker.py` and `tensorflow/worker.py` implement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat, SupportsInt

import numpy as np

from allstep.common.collectives import Collectives
from allstep.common.data.loader import Batch
from allstep.common.trace import OpenRecorder


@dataclass(frozen=True)
class StepResult:
    """What a step comes to that was started; to look at it waits for the device."""

    loss_sum: SupportsFloat
    """The sum of the losses of this rank's samples; with --slices that of all on rank 0, and 0 on the others."""
    overflow: SupportsInt = 0
    """Above 0 where a gradient of any rank was not finite, so that no rank has changed a weight; with fp16 alone."""
    squares_of_parts: SupportsFloat = 0.0
    """In a step that `noise_scale` measures: the square of the norm of the gradient of a part's mean loss, added up
    over the parts of this rank."""
    square_of_average: SupportsFloat = 0.0
    """Likewise, of the averaged gradient."""

    def __float__(self) -> float:
        return float(self.loss_sum)


class StepTrace(Protocol):
    """What keeps digests of the steps of a worker."""

    def close(self) -> None:
        """Write those of steps that a GPU has ended meanwhile."""
        ...


class Worker(Protocol):
    """A network, its optimizer and a device, driven step by step by the engine."""

    framework: str
    """pytorch or tensorflow."""
    collectives: Collectives
    device: Any
    """What it computes on, as the framework names it."""
    num_parts: tuple[int, ...]
    """Into how many parts, whose gradients are known by themselves, a global batch is cut: by ranks, each slice by the
    devices of its rank, each of those by passes. Empty where there is but one, or the strategy does not see them."""

    def compile(self, batch: Batch) -> None:
        """Under --compile: take a step on a batch, so that those of its size are compiled, and nothing else remains.

        All ranks call it with their slices of one global batch.
        """
        ...

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        """From here on keep digests of each step; see `common.trace`."""
        ...

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        """One optimizer step on the global batch of which `batch` is this rank's slice.

        Args:
            loss_scale: see `common.loss_scale`; 1 but with --precision fp16.
        """
        ...

    def eval_step(self, batch: Batch) -> tuple[float, float]:
        """Sums over this rank's samples of the loss and of the metric (`common.losses.metric_of`)."""
        ...

    def averaged_weights(self) -> AbstractContextManager:
        """Within it, evaluation and export see the moving averages of the weights, where --ema keeps them.

        All ranks call it.
        """
        ...

    def average_statistics(self) -> None:
        """Give all ranks the mean of the running statistics that batch norms keep of each rank's samples.

        They are moving averages, which are linear: averaged at whatever moments, they come to the same (but for a step
        that has no samples for some rank, which keeps its own), and training does not look at them. All ranks call it;
        it does nothing where there is no batch norm, or one that keeps them.
        """
        ...

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Trainable weights by name, in the framework's own layout and without a copy where possible.

        A weight that several devices of this process hold comes once for each, one after the other.
        """
        ...

    def export_weights(self) -> dict[str, np.ndarray]:
        """All weights by canonical name and layout, the same in both frameworks (see `common.weights`).

        All ranks call it, since each may hold a part; what rank 0 gets is valid.
        """
        ...

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `export_state` gives after the first step."""
        ...

    def export_state(self) -> dict[str, np.ndarray]:
        """Weights as `model/NAME`, optimizer slots as `optimizer/NAME/SLOT` and moving averages of weights as
        `ema/NAME`, all in canonical layout; a slot that is one number a weight has no axes.

        All ranks call it, since each may hold a part; what rank 0 gets is valid.
        """
        ...

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Set what `arrays` names of `export_state`, and the number of steps that the optimizer has taken."""
        ...

    def pending_tensors(self) -> Sequence[str]:
        """Names of the tensors that this rank waits for in a training step; empty where nothing is known.

        Where the strategy does not know which, the collective in words. Another thread than that of the training loop
        calls it, in a step alone; whether the rank waits or computes, the answer may be the same.
        """
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that compute."""
        ...

    def peak_memory_bytes(self) -> int:
        """The most memory used so far: of the GPU where there is one, else of the process."""
        ...
