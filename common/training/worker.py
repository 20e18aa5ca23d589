"""Interface of the engine to a framework; `pytorch/worker.py` and `tensorflow/worker.py` derive from it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat, SupportsInt

import numpy as np

from allstep.common.base.collectives import Collectives
from allstep.common.checkpoint.state import ArrayShape
from allstep.common.data.loader import Batch
from allstep.common.exact.trace import OpenRecorder


@dataclass(frozen=True)
class StepResult:
    """Result of a step that has been started; converting a field to a number waits for the device."""

    loss_sum: SupportsFloat
    """Sum of the losses of this rank's samples. With --slices, rank 0 has the sum over all ranks, the others have 0."""
    overflow: SupportsInt = 0
    """Above 0 if a gradient of any rank was not finite, so that all ranks skipped the update; only with fp16."""
    squares_of_parts: SupportsFloat = 0.0
    """Sum over this rank's parts of the squared norm of the gradient of the part's mean loss, in steps that
    `common.recipe.noise_scale` measures."""
    square_of_average: SupportsFloat = 0.0
    """Squared norm of the averaged gradient, in the same steps."""

    def __float__(self) -> float:
        return float(self.loss_sum)


class StepTrace(Protocol):
    """Writes digests of each step that a worker trains."""

    def close(self) -> None:
        """Wait for the digests that a GPU is still computing, and write them."""
        ...


class Worker(ABC):
    """Network, optimizer and device, driven step by step: a facade over the framework's step and state."""

    _step: Any
    """The framework's `Step`."""
    _state: Any
    """The framework's `State`."""
    _strategy: Any
    framework: str
    """pytorch or tensorflow."""
    collectives: Collectives
    device: Any
    """The device, as the framework names it."""
    num_parts: tuple[int, ...]
    """Numbers of parts of a global batch whose gradients can be seen separately: ranks, then devices of a rank, then
    passes of a device. Empty if there is one part, or the strategy does not expose the parts' gradients."""

    def compile(self, batch: Batch) -> None:
        """Compile the step for batches of this size by running it once and restoring the state; only with --compile.

        Collective: all ranks call it with their slices of one global batch.
        """
        before = self._state.snapshot()
        float(self.train_step(batch, 0.0))
        self._state.restore(before)

    @abstractmethod
    def trace(self, open_recorder: OpenRecorder) -> StepTrace:
        """Start to write digests of each step; see `common.exact.trace`."""

    def train_step(self, batch: Batch, learning_rate: float, loss_scale: float = 1.0) -> StepResult:
        """Start one optimizer step on the global batch of which `batch` is this rank's slice.

        `loss_scale` (`common.recipe.loss_scale`) is 1 without --precision fp16.
        """
        return self._step(batch, learning_rate, loss_scale)

    @abstractmethod
    def eval_step(self, batch: Batch) -> tuple[float, np.ndarray]:
        """Return the loss summed over this rank's samples, and the network's outputs for them, float32 (n, ...).

        Where `common.catalog.losses.are_of_scores`, it returns `common.training.metrics.Scores` of them.
        """

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[Any]:
        """Return a context in which `eval_step` may be called, with --slices once for each slice of the rank.

        Collective: all ranks call it.
        """

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Return a context in which evaluation and export use the moving averages of the weights, if --ema is given.

        Collective: all ranks call it.
        """
        for observer in self._step.observers:
            observer.exchange_weights()
        try:
            yield
        finally:
            for observer in self._step.observers:
                observer.exchange_weights()

    def average_statistics(self) -> None:
        """Average over all ranks the running statistics that batch norms keep of each rank's samples.

        Training does not read them, and moving averages are linear, so it does not matter how often they are averaged
        (except that a step without samples for a rank leaves that rank's statistics unchanged). Collective: all ranks
        call it. It does nothing if the network has no such statistics.
        """
        self._state.average_statistics()

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield trainable weights with their names, in the framework's layout and without a copy where possible.

        A weight that several devices of this process hold comes once per device, one after the other.
        """
        return self._state.parameters()

    def export_weights(self) -> dict[str, np.ndarray]:
        """Return all weights by canonical name and layout, the same in both frameworks (see `common.recipe.weights`).

        Collective: all ranks call it, since each may hold a part. Only the result on rank 0 is valid.
        """
        return self._state.export_weights()

    def state_shapes(self) -> dict[str, ArrayShape]:
        """Return names and shapes of the arrays that `export_state` returns after the first step."""
        return self._state.shapes()

    def export_state(self) -> dict[str, np.ndarray]:
        """Return weights as `model/NAME`, optimizer slots as `optimizer/NAME/SLOT` and moving averages of weights as
        `ema/NAME`, all in canonical layout. A slot with one number per weight tensor is an array without axes.

        Collective: all ranks call it, since each may hold a part. Only the result on rank 0 is valid.
        """
        return self._state.export()

    def import_state(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Restore the state after `step` optimizer steps from `arrays`, which have the names of `export_state`."""
        self._state.load(arrays, step)

    def pending_tensors(self) -> Sequence[str]:
        """Return names of the tensors whose all-reduce this rank may be waiting for in a training step.

        A strategy that does not know its tensors describes the collective; the result is empty if nothing is known. The
        watchdog thread calls it, and only during steps.
        """
        return self._strategy.reduction.pending_tensors()

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return versions of the libraries that compute."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the peak memory so far: of the GPU if the worker has one, else of the process."""
