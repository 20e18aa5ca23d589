"""Training steps that have been started and whose results have not been read yet.

Reading a result waits for the device, so the engine first starts the next step, and a GPU never waits for the host.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allstep.common.base.errors import UserError
from allstep.common.data.loader import Batch
from allstep.common.recipe.noise_scale import is_measured
from allstep.common.recipe.progress import Progress
from allstep.common.training.worker import StepResult

DIVERGED = "expected a finite"
"""Start of the error message of a run that has diverged."""


@dataclass(frozen=True)
class StartedStep:
    """Training step, from its start until its result is read."""

    number: int
    """Step number, from 1, over all epochs."""
    batch: Batch
    learning_rate: float
    loss_scale: float | None
    """Loss scale with --precision fp16, else None."""
    result: StepResult

    def loss_sum(self) -> float:
        """Wait for the device, and return the sum of the losses of this rank's samples.

        Raises UserError if the sum is not finite.
        """
        # With --slices, rank 0 has the losses of all samples.
        loss_sum = float(self.result) if self.batch.num_samples or self.batch.slices else 0.0
        if not math.isfinite(loss_sum):
            raise UserError(
                f"{DIVERGED} loss, received {loss_sum} at step {self.number} with learning rate "
                f"{self.learning_rate:g}; lower --base-lr or lengthen --warmup-epochs"
            )
        return loss_sum


class StepsInFlight:
    """Started steps of an epoch, oldest first; their results are added to the progress of the run."""

    def __init__(
        self,
        progress: Progress,
        *,
        maximum: int,
        num_parts: Sequence[int],
        on_result: Callable[[StartedStep, float], None],
    ) -> None:
        """Start the clock of the epoch.

        Args:
            maximum: number of steps that may be in flight while the next one is prepared.
            num_parts: see `Worker`.
            on_result: called with each step and the sum of its losses, in order.
        """
        self._progress, self._maximum, self._num_parts, self._on_result = progress, maximum, num_parts, on_result
        self._steps: deque[StartedStep] = deque()
        self._clock_started = time.perf_counter()

    def add(self, step: StartedStep) -> None:
        """Add a step, and read the results of the oldest ones until at most `maximum` are in flight."""
        self._steps.append(step)
        self._finish(self._maximum)

    def finish(self) -> None:
        """Read the results of all steps."""
        self._finish(0)

    def restart_clock(self) -> float:
        """Restart the clock, and return the seconds since its last start, which are not counted as training."""
        before, self._clock_started = self._clock_started, time.perf_counter()
        return self._clock_started - before

    def _finish(self, num_left: int) -> None:
        while len(self._steps) > num_left:
            step = self._steps.popleft()
            loss_sum = step.loss_sum()
            self._count(step, loss_sum)
            self._on_result(step, loss_sum)
        self._progress.epoch_seconds += self.restart_clock()

    def _count(self, step: StartedStep, loss_sum: float) -> None:
        progress, result = self._progress, step.result
        progress.loss_sum += loss_sum
        if step.loss_scale is not None:
            overflowed = int(result.overflow) > 0
            progress.loss_scale = progress.loss_scale.after(step.loss_scale, overflowed=overflowed)
        if self._num_parts and is_measured(step.number):
            squares = float(result.squares_of_parts), float(result.square_of_average)
            progress.noise = progress.noise.after(*squares, step.batch.num_global, num_parts=self._num_parts)
