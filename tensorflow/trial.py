"""Trial of a network on samples of random numbers; `pytorch/trial.py` has the same for PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import seeded
from allstep.common.catalog.network_outputs import logits_of
from allstep.common.data.datasets import Dataset
from allstep.common.training.trial import (
    FACTORS,
    TRIAL,
    PassState,
    are_multiples,
    are_probabilities,
    num_samples,
    try_passes,
    variants_of,
)
from allstep.tensorflow.compat import global_seed_generator, in_training, layers_of, noting_draws
from allstep.tensorflow.networks.batch_norm import BatchNorm
from allstep.tensorflow.passes import losses_of_layers


def try_network(
    network: keras.Model, dataset: Dataset, model: str, *, is_of_user: bool = False, in_parts: bool = False
) -> Any:
    """Return the network's outputs for two samples of random numbers.

    The trial covers training as well, to find what a pass changes; all variables stay as they are.

    Returns: outputs in validation, or those in training if these have another shape.
    """
    draw, shape = np.random.default_rng(0), (num_samples(dataset.input_shape), *dataset.input_shape)
    if dataset.input_type == "int64":
        samples, drawn = (draw.integers(max(1, dataset.num_tokens), size=shape) for _ in range(2))
    else:
        samples, drawn = (draw.standard_normal(shape, np.float32) for _ in range(2))
    call = network.call

    @functools.wraps(call)
    def logits(*arguments: Any, **options: Any) -> Any:
        return logits_of(call(*arguments, **options), tuple(dataset.output_shape))

    network.__dict__["call"] = logits  # as it is: Keras tracks what is set
    created: list[tf.Variable] = []

    def noted(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        created.append(create(**options))
        return created[-1]

    with tf.variable_creator_scope(noted):
        outputs = network(samples[:2], training=False)
    known = {id(one) for one in (*_variables(network).values(), *(one.value for one in network.variables))}
    if lost := [one.name for one in created if one.trainable and id(one) not in known]:
        raise UserError(
            f"--model {model} makes layers in its call, whose weights no step would train, as {lost[0]}; make them in "
            "__init__ or build"
        )
    if getattr(outputs, "_keras_mask", None) is not None:
        raise UserError(
            f"--model {model} ends in a mask of its outputs, which Keras' losses heed and the trainer's do not; "
            "end the mask before, as a recurrent layer does"
        )
    trained, state = _tried(network, variants_of(samples, drawn), is_of_user=is_of_user, in_parts=in_parts)
    softmax = isinstance(outputs, tf.Tensor) and are_probabilities(tf.cast(outputs, tf.float32).numpy())
    setattr(network, TRIAL, dataclasses.replace(state, ends_in_softmax=softmax))
    if not isinstance(trained, tf.Tensor) or not isinstance(outputs, tf.Tensor):
        return trained if isinstance(outputs, tf.Tensor) else outputs
    return outputs if trained[:2].shape == outputs.shape else trained[:2]


def _tried(
    network: keras.Model, variants: Sequence[np.ndarray], *, is_of_user: bool, in_parts: bool
) -> tuple[object, PassState]:
    """Return the outputs of a pass in training, and the state that passes change; restore the network's state."""
    before, found, drawn, samples = Snapshot(network), [], [], variants[0]
    gradients: list[list[np.ndarray | None]] = []
    num_regularized = sum(weight.regularizer is not None for weight in network.trainable_weights)
    adds = len(network.losses) > num_regularized  # in the pass before, what may depend on samples

    def passed(inputs: np.ndarray, training: bool = True, seed: int = 0) -> Any:
        before.reseed(seed)
        tf.random.set_seed(seed)
        with seeded(seed), noting_draws(drawn):
            return network(inputs, **(in_training(network) if training else {"training": False}))

    def run(number: int, seed: int) -> np.ndarray | None:
        is_compared = may_couple and number == len(gradients) < len(FACTORS)
        with tf.GradientTape() if is_compared else nullcontext() as tape:
            found.append(passed(variants[number], seed=seed))
            if not isinstance(found[-1], tf.Tensor):
                return None
            outputs = tf.cast(found[-1], tf.float32)
            if tape:
                kept = tf.reshape(outputs[1::2], [-1])  # of those samples that are the same
                loss = tf.reduce_mean(kept * np.cos(np.arange(len(kept)))) * FACTORS[number]  # no sum of these is 0
        if tape:
            gradients.append(sizes(tape, loss))
        return outputs.numpy()

    def sizes(tape: tf.GradientTape, loss: tf.Tensor) -> list[np.ndarray | None]:
        """Return norm and sum of each gradient, which are few numbers of large weights."""
        devices = tf.distribute.get_strategy().experimental_local_results
        weights = [devices(variable.value)[0] for variable in network.trainable_variables]
        dense = [None if one is None else tf.convert_to_tensor(one) for one in tape.gradient(loss, weights)]
        return [None if one is None else np.array([tf.norm(one), tf.reduce_sum(one)]) for one in dense]

    def added(inputs: np.ndarray) -> float:
        """Return the losses that layers add for samples, without dropout, whose draws depend on their number."""
        before.restore()
        passed(inputs, training=False)
        return float(losses_of_layers(network, tf.constant(inputs)))

    norms = [layer for layer in layers_of(network) if isinstance(layer, (BatchNorm, keras.layers.BatchNormalization))]
    may_couple = in_parts and is_of_user and all(type(norm) is keras.layers.BatchNormalization for norm in norms)
    norms = [norm for norm in norms if may_couple and norm.trainable]
    trainable = [(variable, variable.trainable) for norm in norms for variable in norm.variables]
    for norm in norms:
        norm.trainable = False  # batch norms couple samples in a known way; the trial looks for other ways
    _, state = try_passes(
        run,
        before,
        averaged=lambda: {name for name in before.names if f"/{MOVING}" in name},
        not_saved=lambda names: names - {variable.path for variable in network.variables},
        may_couple=may_couple,
    )
    if adds and may_couple and isinstance(found[0], tf.Tensor):
        several = [samples] if samples.dtype.kind == "i" else [_apart(samples, scale) for scale in _SCALES]
        sums = ((added(some[:1]) + added(some[1:]), added(some)) for some in several)
        differs = not all(np.isclose(*pair, rtol=1e-3, equal_nan=True) or before.has_drawn() for pair in sums)
        state = dataclasses.replace(state, couples_samples=state.couples_samples or differs)
    state = dataclasses.replace(state, adds_losses=adds)
    if gradients:
        state = dataclasses.replace(state, has_nonlinear_gradients=not are_multiples(*gradients, factor=FACTORS[1]))
    if drawn:
        state = dataclasses.replace(state, not_saved=(*state.not_saved, _TF_RANDOM), needs_unsaved=True)
    before.restore()
    for norm in norms:
        norm.trainable = True
    for variable, value in trainable:
        variable.trainable = value
    return found[0], state


_SCALES = (1, 3, 10)


def _apart(samples: np.ndarray, scale: float) -> np.ndarray:
    """Return scaled samples, the first one made small, since the loss that a layer adds may have a lower bound."""
    factors = np.where(np.arange(len(samples)) > 0, scale, 1 / scale).astype(samples.dtype)
    return samples * factors.reshape(-1, *[1] * (samples.ndim - 1))


class Snapshot:
    """Copy of a network's variables, including TensorFlow variables in its layers, which Keras does not track."""

    def __init__(self, network: keras.Model, *, unchanged: Mapping[str, np.ndarray] = {}) -> None:
        self._network = network
        self._variables = variables = _variables(network)
        self._states = random_states(network)
        # Flags and counts of Python, as Keras finds them when it traces the first step.
        self._attributes = [
            (layer, name, value)
            for layer in layers_of(network)
            if not type(layer).__module__.startswith("keras.")
            for name, value in vars(layer).items()
            if isinstance(value, _PLAIN) and name not in _OF_KERAS
        ]
        self._values = {**{path: one.numpy() for path, one in variables.items() if path not in unchanged}, **unchanged}
        self._seeds = [np.array(state.numpy()) for state in self._states]

    @property
    def names(self) -> set[str]:
        """Names of all variables."""
        return set(self._variables)

    def changes(self) -> set[str]:
        """Return the names of the variables that have changed since, without random states."""
        return {
            path
            for path, variable in self._variables.items()
            if not path.endswith(_SEED) and variable.numpy().tobytes() != self._values[path].tobytes()
        }

    def next(self, changed: Collection[str]) -> Snapshot:
        """Return a snapshot of the present state, which differs from this one only in the names of `changed`."""
        same = {path: value for path, value in self._values.items() if path not in changed and not path.endswith(_SEED)}
        return Snapshot(self._network, unchanged=same)

    def restore(self, *, without: Collection[str] = ()) -> None:
        """Restore all values, except for the names of `without`."""
        for path, variable in self._variables.items():
            if path not in without:
                variable.assign(self._values[path])
        for layer, name, value in self._attributes:
            if isinstance(vars(layer).get(name), _PLAIN):  # and no layer that was built in the first call
                layer.__dict__[name] = value
        self.reseed()

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since the random states were restored."""
        return any(
            not np.array_equal(state.numpy(), value) for state, value in zip(self._states, self._seeds, strict=True)
        )

    def reseed(self, offset: int = 0) -> None:
        """Restore the random states, plus an offset."""
        for state, value in zip(self._states, self._seeds, strict=True):
            state.assign(value + np.asarray(offset, value.dtype))


def _variables(network: keras.Model) -> dict[str, Any]:
    """Return a network's variables by path, including TensorFlow variables in layers, which Keras does not track."""
    variables = {variable.path: variable.value for variable in network.variables}
    known = {id(value) for value in variables.values()}
    for layer in layers_of(network):
        for name, value in vars(layer).items():
            for number, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                draws = isinstance(one, tf.random.Generator)
                raw, path = one.state if draws else one, f"{getattr(layer, 'path', layer.name)}/{name}{number or ''}"
                if isinstance(raw, tf.Variable) and id(raw) not in known:
                    variables[f"{path}/{_SEED}" if draws else path] = raw
    return variables


def random_states(network: keras.Model) -> list[Any]:
    """Return the random states of layers; the last is Keras' global one, for keras.random.normal() without a seed."""
    own = [variable for path, variable in _variables(network).items() if path.endswith(_SEED)]
    return [*own, global_seed_generator().state]


_PLAIN = (bool, int, float, str, type(None))
_OF_KERAS = frozenset(vars(keras.Model(name="any"))) | {"_called"}
MOVING = "moving_"
"""Beginning of the names of running statistics."""
_TF_RANDOM = "the state of tf.random, unlike that of keras.random,"
_SEED = "seed_generator_state"
"""End of the paths of Keras' random states."""
