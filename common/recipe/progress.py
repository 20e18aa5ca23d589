"""Progress of a run, which the engine updates and a checkpoint keeps."""

import math
from dataclasses import dataclass, field

from allstep.common.data.sharding import Position
from allstep.common.recipe.loss_scale import LossScale
from allstep.common.recipe.noise_scale import NoiseScale


@dataclass
class Progress:
    """State of a run outside the worker."""

    position: Position = Position(0, 0)
    """Position in the order of samples."""
    step: int = 0
    """Number of completed steps, including those that --precision fp16 has skipped."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """Loss scale of the next step with --precision fp16; otherwise it never changes."""
    noise: NoiseScale = field(default_factory=NoiseScale)
    """This rank's share of the noise scale of the gradients so far."""
    batch_ramp: tuple[tuple[float, int], ...] = ()
    """Growth of the global batch so far with --batch-ramp auto; see `Schedule`."""
    lr_drops: tuple[float, ...] = ()
    """Epochs so far at which --lr-decay plateau lowered the learning rate; see `Schedule.milestones`."""
    loss_sum: float = 0.0
    """Sum of the losses of this rank's samples in this epoch."""
    learning_rate: float = 0.0
    """Learning rate of the last step."""
    epoch_seconds: float = 0.0
    """Seconds spent on training steps in this epoch."""
    cumulative_seconds: float = 0.0
    """Seconds spent on training steps in all completed epochs."""
    best_validation_loss: float = math.inf
    """Lowest validation loss so far."""
    epochs_without_gain: int = 0
    """Number of epochs since then."""

    def finish_epoch(self, validation_loss: float) -> None:
        """Advance to the next epoch after one with this validation loss."""
        self.position = Position(self.position.epoch + 1, 0)
        self.cumulative_seconds += self.epoch_seconds
        self.loss_sum = self.epoch_seconds = 0.0
        gained = validation_loss < self.best_validation_loss
        self.best_validation_loss = min(validation_loss, self.best_validation_loss)
        self.epochs_without_gain = 0 if gained else self.epochs_without_gain + 1
