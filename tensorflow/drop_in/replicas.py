"""Check that the ranks' models are replicas, also by each callback of Horovod (`InStep`).

On the ranks of an optimizer's process set, the weights that it trains and its state must be equal: slots, iterations,
learning rate, averages, loss scale; and weights that layers change themselves. Other state may differ between ranks:
accumulated gradients, local variables and their slots, the running statistics of batch norms (over each rank's samples;
variables named moving_...), random streams and metrics.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from allstep.common.exact.replica_check import DROP_IN_CHECK, OUT_OF_STEP, digest
from allstep.tensorflow.compat import layers_of, trained_variables
from allstep.tensorflow.derived_state import constants_of
from allstep.tensorflow.drop_in.collectives import gather, native, per_rank
from allstep.tensorflow.drop_in.optimizer import Distributed, is_distributed, lasting_state, parts
from allstep.tensorflow.drop_in.saving import num_ranks

# Largest difference of projections on a random direction, relative to the norm: far above the accumulated rounding of
# float32 (6e-8), and far below the divergence after an epoch without synchronisation.
_DRIFT = 1e-3


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Return the model's optimizer and those that the model or its layers hold as attributes (as in a GAN)."""
    held = [getattr(model, "optimizer", None)]
    for layer in layers_of(model):
        held += _leaves(vars(layer))
    found = list({id(o): o for o in held if isinstance(o, keras.optimizers.Optimizer)}.values())
    inside = {id(part) for o in found for part in parts(o) if part is not o}
    return [o for o in found if id(o) not in inside]


def is_built(model: keras.Model) -> bool:
    """Return whether the weights of a model exist, also of one that is never called itself, as of a GAN.

    Keras marks a model as built whose `build` it cannot call, and whose layers are not.
    """
    inside = [layer for layer in layers_of(model) if layer is not model]
    if model.built:
        return bool(model.trainable_variables) or all(layer.built for layer in inside)
    has_own_build = type(model).build is not keras.Model.build
    return not has_own_build and bool(model.trainable_variables) and all(layer.built for layer in inside)


def refusal(model: keras.Model) -> str | None:
    """Return why this model must not train on the ranks of this job, or None if it may.

    A user's `train_step` may average gradients itself (DistributedGradientTape) and ignore the optimizer of `compile`.
    With one, only a plain optimizer that the model holds next to a distributed one is a reason.
    """
    if is_built(model) and not model.trainable_variables:
        return None
    optimizers = optimizers_of(model)
    if type(model).train_step is keras.Model.train_step:
        if model.optimizer is None:
            return "expected a model with an optimizer; received one compiled with optimizer=None, which cannot train."
        plain = [] if is_distributed(model.optimizer) else [model.optimizer]
    elif any(map(is_distributed, optimizers)):
        plain = [o for o in optimizers if o is not model.optimizer and not is_distributed(o)]
    else:
        plain = []
    if not plain or num_ranks() == 1:
        return None
    return (
        f"expected an optimizer that shares its gradients with the other ranks; received {type(plain[0]).__name__} "
        f"{plain[0].name!r}, with which each of the {num_ranks()} ranks would train a model of its own. Wrap it, "
        "model.compile(hvd.DistributedOptimizer(optimizer), ...), or load the model with hvd.load_model."
    )


def build_alike(model: keras.Model) -> None:
    """Build the model's optimizers for the same weights on all ranks, so that their variables can be broadcast.

    It is needed if only one rank has restored them. All ranks call it.
    """
    optimizers, weights = optimizers_of(model), model.weights
    index = {native(v).ref(): i for i, v in enumerate(weights)}
    order = np.zeros((1, len(optimizers), len(weights)), np.int64)  # counted from 1; 0 is not built for this weight
    for row, optimizer in zip(order[0], optimizers, strict=True):
        for position, variable in enumerate(trained_variables(optimizer) if optimizer.built else ()):
            if native(variable).ref() in index:
                row[index[native(variable).ref()]] = position + 1
    gathered = hvd.allgather(tf.constant(order), name="build_alike").numpy()
    for optimizer, rows in zip(optimizers, gathered.swapaxes(0, 1), strict=True):
        built = rows[rows.any(axis=1)]
        if not optimizer.built and len(built):
            optimizer.build([weights[i] for i in np.argsort(built[0]) if built[0][i]])
        elif not optimizer.built and optimizer is model.optimizer:
            optimizer.build(model.trainable_variables)


def rank_local_variables(model: keras.Model, local_variables: set[Any]) -> set[Any]:
    """Return the `tf.Variable.ref()` of `local_variables`, those that the optimizers know, and the slots of both."""
    optimizers = optimizers_of(model)
    own = local_variables.union(*(part._reduction.local_variables for part in _distributed_parts(optimizers)))
    return own | _slots_of(own, optimizers)


def check_replicas(model: keras.Model, local_variables: set[Any], moment: str) -> None:
    """Compare the model's replicas over the ranks, by 64 bits of each variable.

    `local_variables` are `tf.Variable.ref()` of weights that may differ, in addition to those that the optimizers know;
    `moment` is for the message: "after epoch 1". Raises RuntimeError, on every rank and with the ranks and the first
    variable that differs, if two ranks differ.
    """
    optimizers = optimizers_of(model)
    own = rank_local_variables(model, local_variables)
    sparse = set().union(*(part._reduction.sparse_variables for part in _distributed_parts(optimizers)))
    sparse |= _slots_of(sparse, optimizers)
    for process_set, variables in _shared_state(model, optimizers):
        if not process_set.included() or process_set.size() == 1:
            continue
        variables = [v for v in variables if native(v).ref() not in own]
        is_sparse = np.array([native(v).ref() in sparse for v in variables], bool)
        codes = [(_projection if s else digest)(native(v).numpy()) for v, s in zip(variables, is_sparse, strict=True)]
        _check_counts(len(variables), process_set, moment)
        codes = tf.constant([codes], tf.int64)
        gathered = hvd.allgather(codes, name=DROP_IN_CHECK, process_set=process_set).numpy()
        differs = _differs(gathered, is_sparse)
        if differs.any():
            assert process_set.ranks is not None  # Horovod knows them on ranks in the set
            ranks = ", ".join(str(process_set.ranks[i]) for i in np.flatnonzero(differs.any(axis=1)))
            first = variables[int(np.flatnonzero(differs.any(axis=0))[0])]
            raise RuntimeError(
                f"{OUT_OF_STEP} {moment}; received others on rank {ranks} than on rank {process_set.ranks[0]}, first "
                f"in {getattr(first, 'path', first.name)}. Start with "
                "callbacks.BroadcastGlobalVariablesCallback(0), train with a DistributedOptimizer, give every rank the "
                "same learning rate and averaged metrics (MetricAverageCallback before EarlyStopping and "
                "ReduceLROnPlateau), and register what is meant to differ (register_local_var)."
            )


def check_constants(model: keras.Model, moment: str, process_set: ProcessSet) -> None:
    """Compare what layers hold beside their variables (`derived_state`).

    Raises ValueError, on all ranks and with layer and attribute, if ranks differ, or have different layers.
    """
    # Names count the layers of a process, so they may differ; positions do not.
    mine = [(type(layer).__name__, *rest, layer.name) for layer, *rest in constants_of(model)]
    everyone = gather([entry[:3] for entry in mine], "derived_state", process_set)
    for position in range(max(map(len, everyone))):
        entries = [entries[position] if position < len(entries) else None for entries in everyone]
        if any(entry != entries[0] for entry in entries):
            kind, attribute, _ = next(entry for entry in entries if entry)
            name = f" {mine[position][3]!r}" if position < len(mine) else ""
            raise ValueError(
                f"expected the same layers on all ranks {moment}; received another `{attribute}` of {kind}{name} on "
                "another rank, which is no variable of Keras, so no broadcast sends it; compute it from the same data "
                "on all ranks, or on rank 0 and send it by hvd.broadcast_object."
            )


def _check_counts(count: int, process_set: ProcessSet, moment: str) -> None:
    """Raise a RuntimeError on all ranks if they have different numbers of variables to compare."""
    counts = gather(count, "counts", process_set)
    if any(other != count for other in counts):
        raise RuntimeError(
            f"expected as many weights and optimizer slots on all ranks {moment}; received "
            f"{per_rank(counts, process_set.ranks)}. Build the same model on all ranks, and start with "
            "callbacks.BroadcastGlobalVariablesCallback(0), which sends what only one rank has loaded."
        )


def _shared_state(
    model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]
) -> Iterator[tuple[ProcessSet, list[Any]]]:
    """Yield variables that must be equal, and on which ranks: on all if no distributed optimizer trains them."""
    rest = {native(v).ref(): v for v in model.trainable_variables}
    beside = shared_statistics(model)
    for part in _distributed_parts(optimizers):
        will_train_all = part is model.optimizer and not part.built
        trained = list(model.trainable_variables if will_train_all else trained_variables(part))
        for variable in trained:
            rest.pop(native(variable).ref(), None)
        yield part._reduction.process_set, [*trained, *lasting_state(part), *beside]
        beside = []
    plain = [] if any(map(is_distributed, optimizers)) else [v for o in optimizers for v in lasting_state(o)]
    if rest or plain:
        yield global_process_set, [*rest.values(), *plain, *beside]


def shared_statistics(model: keras.Model) -> list[Any]:
    """Return weights that no optimizer changes (frozen ones, counters, codebooks), without running averages."""
    return [v for v in model.non_trainable_weights if not v.name.startswith("moving_")]


def _distributed_parts(optimizers: Sequence[keras.optimizers.Optimizer]) -> list[Distributed]:
    return [part for o in optimizers for part in parts(o) if isinstance(part, Distributed)]


def _slots_of(variables: set, optimizers: Sequence[keras.optimizers.Optimizer]) -> set:
    """Return the `tf.Variable.ref()` of the optimizers' variables that are named after one of `variables`.

    Keras names a slot after its variable. If two variables share a name, the slots of both are returned.
    """
    names = {
        path.replace("/", "_").replace(":", "_") + "_"
        for o in optimizers
        for part in parts(o)
        for v in trained_variables(part)
        if native(v).ref() in variables
        for path in [getattr(v, "path", v.name)]
    }
    return {native(v).ref() for o in optimizers for v in o.variables if v.name.startswith(tuple(names))}


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dictionaries, whose keys need no order as in `keras.tree`."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


def _projection(array: np.ndarray) -> int:
    """Return the projection on a random direction and the norm, as the two halves of a 64-bit integer.

    TensorFlow adds rows of an embedding's gradient in an order that changes, so replicas agree only within rounding.
    """
    rows = np.atleast_1d(np.asarray(array, np.float32))
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    generator = np.random.default_rng(0)
    left, right = (generator.choice([-1.0, 1.0], size) for size in rows.shape)
    projection = left @ np.einsum("ij,j->i", rows, right)
    norm = np.sqrt(np.einsum("ij,ij->", rows, rows, dtype=np.float64))
    return int(np.array([projection, norm], np.float32).view(np.int64)[0])


def _differs(gathered: np.ndarray, is_sparse: np.ndarray) -> np.ndarray:
    """Return a mask of the gathered codes (ranks, variables) that differ from those of the first rank."""
    differs = gathered != gathered[0]
    halves = np.ascontiguousarray(gathered).view(np.float32).reshape(*gathered.shape, 2)
    projections, norms = halves[..., 0], halves[..., 1]
    with np.errstate(invalid="ignore"):  # digests read as floats
        is_near = np.abs(projections - projections[0]) <= _DRIFT * np.maximum(norms, norms[0])
    return differs & ~(is_near & is_sparse)


class InStep(keras.callbacks.Callback):
    """Refuses to train replicas that would diverge, and compares them at the end of each epoch.

    `fit_guard` compares them at the start and the end of `fit` as well. Several callbacks of one `fit` compare only
    once: they share their state in the `params` that Keras passes to all. Raises ValueError at the start if the model's
    optimizer is not distributed, RuntimeError if weights or optimizer state differ between ranks (see
    `horovod_replicas`).
    """

    model: keras.Model
    """The model, which Keras sets before it calls any method."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        refuse_undistributed(self.model)
        self._shared()["compared"] = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._compare(f"after epoch {epoch + 1}")

    def _compare(self, moment: str) -> None:
        shared = self._shared()
        if shared["compared"] != moment:
            shared["compared"] = moment
            check_replicas(self.model, shared["local_variables"], moment)

    def _shared(self) -> dict[str, Any]:
        params = self.params
        if params is None:  # in a custom loop
            self.set_params(params := {})
        return params.setdefault("horovod", {"compared": None, "local_variables": set()})


def refuse_undistributed(model: keras.Model) -> None:
    """Raise a ValueError if each rank would train a separate model."""
    if reason := refusal(model):
        raise ValueError(reason)
