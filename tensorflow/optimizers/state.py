"""State of optimizers in checkpoints. `pytorch/optimizers/state.py` has the same.

The suite's optimizers, and those of Keras with the same state, have canonical names for it, which both frameworks read.
Any other optimizer of a user keeps the names of the attributes that hold its variables.
"""

from collections.abc import Iterator, Mapping, Sequence

import keras

from allstep.common.base.errors import UserError
from allstep.common.config.train_config import OWN_OPTIMIZER, OptimizerConfig
from allstep.tensorflow.compat import parts, trained_variables
from allstep.tensorflow.models import CanonicalWeight, unchanged
from allstep.tensorflow.optimizers.base import Optimizer, is_embedding

KINDS: Mapping[type, tuple[str, Mapping[str, str]]] = {
    keras.optimizers.SGD: ("sgd", {"momentum": "momentums"}),
    keras.optimizers.Adam: ("adam", {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}),
    keras.optimizers.AdamW: ("adamw", {"exp_avg": "_momentums", "exp_avg_sq": "_velocities"}),
    keras.optimizers.Adagrad: ("adagrad", {"sum_of_squares": "_accumulators"}),
    keras.optimizers.RMSprop: ("rmsprop", {"square_avg": "_velocities"}),
}
"""Names of Keras' optimizers for `--optimizer`, and the attributes that hold the canonical slots."""
State = Iterator[tuple[str, CanonicalWeight]]
"""Variables and their names in a checkpoint."""


def optimizer_state(optimizer: keras.Optimizer, flags: OptimizerConfig, weights: Sequence[CanonicalWeight]) -> State:
    """Yield the part of a checkpoint whose names begin with `optimizer/`.

    `weights` are those with gradients, in the model's order. Raises UserError if a checkpoint cannot hold a variable of
    the optimizer.
    """
    if flags.optimizer == OWN_OPTIMIZER:
        yield from _local_state(optimizer, {weight.variable.path: weight for weight in weights})
        return
    for index, weight in enumerate(weights):
        for slot in flags.slots_of(len(weight.variable.shape), is_embedding=is_embedding(weight.variable)):
            yield f"optimizer/{weight.name}/{slot}", weight.like(_slots(optimizer, slot)[index])


def _slots(optimizer: keras.Optimizer, slot: str) -> Sequence[keras.Variable]:
    if isinstance(optimizer, Optimizer):
        return optimizer.slots[slot]
    [(_, attributes)] = [KINDS[kind] for kind in type(optimizer).__mro__ if kind in KINDS][:1]
    return getattr(optimizer, attributes[slot])


def _local_state(optimizer: keras.Optimizer, weights: Mapping[str, CanonicalWeight]) -> State:
    for number, part in enumerate(parts(optimizer)):
        own = [weights[variable.path] for variable in trained_variables(part)] if part.built else []
        unnamed = {id(one): one for one in part.variables if one is not part._iterations}
        unnamed.pop(id(part._learning_rate), None)
        for attribute, value in vars(part).items():
            name = attribute.lstrip("_")
            if isinstance(value, keras.Variable) and unnamed.pop(id(value), None) is not None:
                yield f"optimizer/{number}/{name}", unchanged(name, value)
            elif isinstance(value, (list, tuple)) and len(value) == len(own):
                for weight, variable in zip(own, value, strict=True):
                    if isinstance(variable, keras.Variable) and unnamed.pop(id(variable), None) is not None:
                        yield f"optimizer/{weight.name}/{name}", weight.like(variable)
        if unnamed:
            path = next(iter(unnamed.values())).path
            raise UserError(
                f"expected an optimizer that keeps its variables in attributes, one a weight, received "
                f"{type(part).__name__}, which keeps {path} elsewhere; take another one"
            )
