"""How far a run has come: what the engine moves forward and a checkpoint keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from allstep.common.data.sharding import Position
from allstep.common.loss_scale import LossScale
from allstep.common.noise_scale import NoiseScale


@dataclass
class Progress:
    """The state of a run outside the worker."""

    position: Position = Position(0, 0)
    """Place in the order of samples."""
    step: int = 0
    """Completed steps, those that --precision fp16 has skipped among them."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Of the next step, with --precision fp16; else it stays as it is."""
    noise: NoiseScale = field(default_factory=NoiseScale)
    """Of the gradients so far; this rank's share."""
    batch_ramp: tuple[tuple[float, int], ...] = ()
    """With --batch-ramp auto, how the global batch has grown: see `Schedule`."""
    loss_sum: float = 0.0
    """Sum of the losses of this rank's samples in this epoch."""
    learning_rate: float = 0.0
    """Of the last step."""
    epoch_seconds: float = 0.0
    """Time spent on training steps in this epoch."""
    cumulative_seconds: float = 0.0
    """The same over all completed epochs."""
    best_validation_loss: float = math.inf
    """Lowest so far."""
    epochs_without_gain: int = 0
    """Epochs since then."""

    def finish_epoch(self, validation_loss: float) -> None:
        """Go on to the next epoch, from one whose validation gave this loss."""
        self.position = Position(self.position.epoch + 1, 0)
        self.cumulative_seconds += self.epoch_seconds
        self.loss_sum = self.epoch_seconds = 0.0
        gained = validation_loss < self.best_validation_loss
        self.best_validation_loss = min(validation_loss, self.best_validation_loss)
        self.epochs_without_gain = 0 if gained else self.epochs_without_gain + 1
