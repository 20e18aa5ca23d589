"""State of a model, its optimizer and the observers of its steps in a checkpoint, for any number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from allstep.common.config.train_config import OptimizerConfig
from allstep.tensorflow.compat import parts
from allstep.tensorflow.derived_state import constants_of, derive_again
from allstep.tensorflow.models import CanonicalWeight, canonical_weights, export_weights
from allstep.tensorflow.optimizers.state import optimizer_state
from allstep.tensorflow.step import Step
from allstep.tensorflow.strategies.strategy import Strategy


class State:
    """Reads and writes the state of a run; `common.training.worker.Worker` says what most methods do."""

    def __init__(self, model: keras.Model, flags: OptimizerConfig, step: Step, strategy: Strategy) -> None:
        self._model, self._flags, self._step, self._strategy = model, flags, step, strategy
        derive_again(model)  # from what the broadcast has sent

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        for weight in canonical_weights(self._model):
            if weight.variable.trainable or not weight.is_float:  # running statistics differ between ranks
                for array in self._strategy.replicas(weight.variable):
                    yield weight.name, array
        for number, (layer, attribute, digest) in enumerate(constants_of(self._model)):
            yield f"constant {number}, {layer.name}.{attribute}", np.frombuffer(digest.encode(), np.uint8)

    def export_weights(self) -> dict[str, np.ndarray]:
        return export_weights(self._model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        weights = {id(variable) for variable in self._model.non_trainable_variables}
        return {name: one.array_shape(is_constant=id(one.variable) in weights) for name, one in self._all()}

    def export(self) -> dict[str, np.ndarray]:
        arrays = self._strategy.gather({name: one.variable for name, one in self._all()})
        return {name: one.to_canonical(arrays[name]) for name, one in self._all()}

    def load(self, arrays: Mapping[str, np.ndarray], num_steps: int) -> None:
        for name, one in self._all():
            if name in arrays:
                one.variable.assign(self._strategy.shard(one.from_canonical(arrays[name]), one.variable))
        derive_again(self._model)
        for part in (self._step.optimizer, *parts(self._step.optimizer)):
            cast("keras.Variable", part.iterations).assign(num_steps)

    def average_statistics(self) -> None:
        collectives = self._strategy.collectives
        weights = (weight for weight in canonical_weights(self._model) if weight.is_float)
        statistics = [weight.variable for weight in weights if not weight.variable.trainable]
        replicas = [self._strategy.replicas(variable) for variable in statistics]
        if not statistics or len(replicas[0]) * collectives.world_size == 1:
            return
        own = np.concatenate([np.mean(arrays, axis=0, dtype=np.float64).ravel() for arrays in replicas])
        mean = collectives.all_reduce_sum(own) / collectives.world_size
        ends = np.cumsum([variable.value.shape.num_elements() for variable in statistics])
        for variable, values in zip(statistics, np.split(mean, ends[:-1]), strict=True):
            variable.assign(values.astype(np.float32).reshape(variable.shape))

    def snapshot(self) -> Any:
        """Return a copy of this rank's state, for `restore`."""
        kept = [one.variable for observer in self._step.observers for _, one in observer.state]
        variables = (*self._model.variables, *self._step.optimizer.variables, *kept)
        copies = [copy for variable in variables for copy in self._strategy.copies(variable)]
        return [(copy, tf.identity(copy)) for copy in copies]

    def restore(self, snapshot: Any) -> None:
        """Put back what `snapshot` returned."""
        for variable, value in snapshot:
            variable.assign(value)

    def _all(self) -> Iterator[tuple[str, CanonicalWeight]]:
        """Yield the names and weights of the whole state in a checkpoint."""
        for weight in canonical_weights(self._model):
            yield f"model/{weight.name}", weight
        yield from optimizer_state(self._step.optimizer, self._flags, trained_weights(self._model))
        for observer in self._step.observers:
            yield from observer.state


def trained_weights(model: keras.Model) -> Sequence[CanonicalWeight]:
    """Return the weights that have gradients, in the model's order."""
    by_path = {weight.variable.path: weight for weight in canonical_weights(model)}
    return [by_path[variable.path] for variable in model.trainable_variables]
