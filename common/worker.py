"""What the engine asks of a framework: the protocol that `pytorch/worker.py` and `tensorflow/worker.py` implement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat, SupportsInt

import numpy as np

from allstep.common.checkpoint.state import ArrayShape
from allstep.common.collectives import Collectives
from allstep.common.data.loader import Batch
from allstep.common.trace import OpenRecorder


@dataclass(frozen=True)
class StepResult:
    """The result of a step that has been started; reading a number of it waits for the device."""

    loss_sum: SupportsFloat
    """The sum of the losses of this rank's samples; with --slices that of all on rank 0, and 0 on the others."""
    overflow: SupportsInt = 0
    """Above 0 where a gradient of any rank was not finite, so that no rank has changed a weight; with fp16 alone."""
    squares_of_parts: SupportsFloat = 0.0
    """In a step that `noise_scale` measures: the squares of the norms of the gradients of the parts' mean losses, added
    up over the parts of this rank."""
    square_of_average: SupportsFloat = 0.0
    """In such a step: the square of the norm of the averaged gradient."""

    def __float__(self) -> float:
        return float(self.loss_sum)


class StepTrace(Protocol):
    """Writes digests of each step of a worker."""

    def close(self) -> None:
        """Write those that are left, which a GPU has computed since."""
        ...


class Worker(Protocol):
    """A network, its optimizer and a device, driven step by step by the engine."""

    framework: str
    """pytorch or tensorflow."""
    collectives: Collectives
    device: Any
    """The device, as the framework names it."""
    num_parts: tuple[int, ...]
    """Into how many parts a global batch is cut whose gradients are seen one by one: by ranks, a rank's slice by its
    devices, a device's samples by passes. Empty where there is one part, or the strategy hides them."""

    def compile(self, batch: Batch) -> None:
        """Under --compile: compile the step for batches of this size, by taking one and restoring the state.

        All ranks call it with their slices of one global batch.
        """
        ...

    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        """Write digests of each step from here on; see `common.trace`."""
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

    def evaluating(self) -> AbstractContextManager:
        """Within it `eval_step` may be called, with --slices by each rank as often as it has slices.

        All ranks call it.
        """
        ...

    def averaged_weights(self) -> AbstractContextManager:
        """Within it, evaluation and export see the moving averages of the weights, where --ema keeps them.

        All ranks call it.
        """
        ...

    def average_statistics(self) -> None:
        """Give all ranks the mean of the running statistics that batch norms keep of each rank's samples.

        Training does not read them, and they are moving averages, which are linear: it does not matter how often they
        are averaged (but for a step without samples for some rank, which leaves that rank's as they were). All ranks
        call it; it does nothing in a network that has no such statistics.
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

    def state_shapes(self) -> dict[str, ArrayShape]:
        """Names and shapes of what `export_state` gives after the first step."""
        ...

    def export_state(self) -> dict[str, np.ndarray]:
        """Weights as `model/NAME`, optimizer slots as `optimizer/NAME/SLOT` and moving averages of weights as
        `ema/NAME`, all in canonical layout; a slot that is one number a weight has no axes.

        All ranks call it, since each may hold a part; what rank 0 gets is valid.
        """
        ...

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Restore what `arrays` has of the state, under the names of `export_state`, after `step` optimizer steps."""
        ...

    def pending_tensors(self) -> Sequence[str]:
        """Names of the tensors whose all-reduce this rank may be waiting for in a training step.

        The collective in words where the strategy does not know its tensors; empty where nothing is known. The thread
        that watches calls it, during steps alone.
        """
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that compute."""
        ...

    def peak_memory_bytes(self) -> int:
        """The most memory used so far: of the GPU where there is one, else of the process."""
        ...


class BaseWorker:
    """What the workers of both frameworks do alike, by the framework's `Step` and `State`."""

    _step: Any
    _state: Any
    _strategy: Any

    def compile(self, batch: Batch) -> None:
        before = self._state.snapshot()
        float(self.train_step(batch, 0.0))
        self._state.restore(before)

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        return self._step(batch, learning_rate, loss_scale)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._step.observers:
                stack.enter_context(observer.averaged_weights())
            yield

    def average_statistics(self) -> None:
        self._state.average_statistics()

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        return self._state.parameters()

    def export_weights(self) -> dict[str, np.ndarray]:
        return self._state.export_weights()

    def state_shapes(self) -> dict[str, ArrayShape]:
        return self._state.shapes()

    def export_state(self) -> dict[str, np.ndarray]:
        return self._state.export()

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        self._state.load(arrays, step)

    def pending_tensors(self) -> Sequence[str]:
        return self._strategy.reduction.pending_tensors()
