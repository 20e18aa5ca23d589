"""Settings that a user's hooks may not change during a run, because a traced step would ignore the change."""

from collections import deque

import keras

from allstep.common.base.errors import UserError
from allstep.common.recipe.schedule import rate_factors
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.tensorflow.compat import layers_of, parts


class SettingsCheck(Hook):
    """Hook after the user's own ones that refuses frozen or unfrozen layers, and changed learning rates."""

    def __init__(self, model: keras.Model, optimizer: keras.Optimizer) -> None:
        self._parts = [(one.path, one) for one in (*layers_of(model), *model.variables)]
        self._trained = [part.trainable for _, part in self._parts]
        self._optimizers = parts(optimizer)
        self._start = self._rates()
        self._recent = deque([self._start])

    def on_start(self, session: TrainingRun) -> None:
        # Asynchronous steps may have set the rates of any step that was in flight.
        self._recent = deque([self._start], maxlen=1 + session.strategy.steps_in_flight)
        self._check_layers()
        self._check_rates()

    def on_step(self, session: TrainingRun) -> None:
        self._check_layers()
        self._recent.append([session.progress.learning_rate * factor for factor in rate_factors(self._start)])
        if session.strategy.gpu is None:  # reading a number would wait for a GPU in each step
            self._check_rates()

    def on_epoch(self, session: TrainingRun) -> None:
        self._check_layers()
        self._check_rates()  # a resumed run may only have to end the epoch

    def _check_layers(self) -> None:
        for (name, part), was_trained in zip(self._parts, self._trained, strict=True):
            if part.trainable != was_trained:
                raise UserError(
                    f"expected the layers of the Session to train as at its start, received {name}, "
                    f"{'frozen' if was_trained else 'unfrozen'} by a hook, which TensorFlow's step does not see; do so "
                    "before the Session, and go on in another one by init_from"
                )

    def _check_rates(self) -> None:
        for rates, found in zip(zip(*self._recent, strict=True), self._rates(), strict=True):
            if all(abs(found - rate) > 1e-6 * rate for rate in rates):  # variables are float32
                raise UserError(
                    f"expected the learning rate {rates[-1]:g}, which the run sets, received {found:g} from a hook; "
                    "give warmup_epochs, lr_decay or lr_milestones"
                )

    def _rates(self) -> list[float]:
        return [float(part.learning_rate.numpy()) for part in self._optimizers]  # pyright: ignore
