"""Networks from a user's file or from keras.applications; `pytorch/other_networks.py` has those for PyTorch.

Weights of top-level layers that PyTorch also has get its names and layouts (`models.canonical_weights`); others keep
their paths in Keras. The network draws its initial weights by --seed, and all ranks start from those of rank 0. If a
file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the suite's
canonical weights, so that their curves can be compared. A dictionary NAMES in the file maps names of Keras layers to
their names in PyTorch, if these differ.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError
from allstep.common.base.random_state import seeded
from allstep.common.base.terminal import note
from allstep.common.catalog import user_file
from allstep.common.catalog.networks import (
    cannot_build,
    check_outputs,
    is_in_both,
    logits_of,
    network_of_user,
    unknown_name,
)
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import (
    FACTORS,
    TRIAL,
    PassState,
    are_probabilities,
    is_bent,
    num_samples,
    try_passes,
    variants_of,
)
from allstep.tensorflow.compat import global_seed_generator, layers_of, noting_draws
from allstep.tensorflow.layer_names import first_names
from allstep.tensorflow.models import NAMES, canonical_weights
from allstep.tensorflow.networks.batch_norm import BatchNorm
from allstep.tensorflow.passes import losses_of_layers


def build_other(
    model: str,
    dataset: Dataset,
    seed: int,
    own: Any = None,
    options: Mapping[str, Any] | None = None,
    *,
    in_parts: bool = True,
) -> keras.Model:
    """Build the network that `model` names and try it on two samples of random numbers.

    Raises UserError if no network has that name, it cannot be built, or its outputs do not fit the data set.

    Args:
        model: FILE.py:FUNCTION or keras:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.
        in_parts: whether a batch may be computed in parts, so that what these would change is tried as well.
    """
    keras.utils.set_random_seed(seed % 2**32)  # NumPy's seeds have 32 bits
    file = user_file.parse(model)
    if own is not None or file:
        network = network_of_user(model, "tensorflow", dataset, own, options or {}, kind=keras.Model)
        if not isinstance(network, keras.Model):
            raise UserError(
                f"expected a keras.Model from --model {model}, received {type(network).__name__}; return one"
            )
        _check_layers(network, model)
        expected = f"a network for samples of shape {dataset.input_shape}"
        outputs = user_file.call(
            _outputs, network, dataset, model, is_of_user=True, in_parts=in_parts, flag=f"--model {model}",
            expected=expected,
        )  # fmt: skip
    else:
        try:
            network = _keras(model.partition(":")[2], dataset, options or {})
            outputs = _outputs(network, dataset, model)
        except UserError:
            raise
        except Exception as error:
            raise cannot_build(model, dataset, error) from error
    tf.random.set_seed((seed + apparent_rank()) % 2**32)  # the trial has drawn from it
    check_outputs(model, outputs, dataset)
    _check_weights(network, model)
    in_pytorch = (user_file.find(file[0], "NAMES", "--model") if file else None) or {}
    names = in_pytorch if is_in_both(model) else {**first_names(network), **in_pytorch}
    network.__dict__[NAMES] = names  # as it is: Keras tracks a dictionary that is set
    found = [weight.name for weight in canonical_weights(network)]
    if twice := {name for name in found if found.count(name) > 1}:
        raise UserError(
            f"expected a name of its own for each weight of --model {model}, received {min(twice)} twice; name the "
            "layers"
        )
    return network


def _keras(name: str, dataset: Dataset, given: Mapping[str, Any]) -> keras.Model:
    functions = {name: value for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    if name not in functions:
        raise unknown_name(f"keras:{name}", functions)
    # Some of these networks can normalise pixels, which the loader has already done.
    known = inspect.signature(functions[name]).parameters
    options = {"include_preprocessing": False} if "include_preprocessing" in known else {}
    return functions[name](
        weights=None,
        input_shape=dataset.input_shape,
        classes=dataset.num_classes,
        classifier_activation=None,
        **options,
        **given,
    )


def _outputs(
    network: keras.Model, dataset: Dataset, model: str, *, is_of_user: bool = False, in_parts: bool = False
) -> object:
    """Return the network's outputs for two samples of random numbers.

    It is tried in training as well, to see what changes in a pass; all variables stay as they are.

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
    outputs = network(samples[:2], training=False)
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
    """Return the outputs of a pass in training, and what passes change; the network keeps the state of before."""
    before, found, drawn, samples = _Snapshot(network), [], [], variants[0]
    gradients: list[list[np.ndarray | None]] = []
    num_regularized = sum(weight.regularizer is not None for weight in network.trainable_weights)
    adds = len(network.losses) > num_regularized  # in the pass before, what may depend on samples

    def passed(inputs: np.ndarray, training: bool = True, seed: int = 0) -> Any:
        before.reseed(seed)
        tf.random.set_seed(seed)
        with seeded(seed), noting_draws(drawn):
            return network(inputs, training=training)

    def run(number: int, seed: int) -> np.ndarray | None:
        is_compared = may_couple and number == len(gradients) < len(FACTORS)
        with tf.GradientTape() if is_compared else nullcontext() as tape:
            found.append(passed(variants[number], seed=seed))
            if not isinstance(found[-1], tf.Tensor):
                return None
            outputs = tf.cast(found[-1], tf.float32)
            if tape:
                kept = tf.reshape(outputs[1::2], [-1])  # of those samples that are the same
                loss = tf.reduce_mean(kept * (1 - 2 * (np.arange(len(kept)) % 2))) * FACTORS[number]
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
        """Return what layers add to the loss of samples; dropout, whose draws depend on their number, is off."""
        before.restore()
        passed(inputs, training=False)
        return float(losses_of_layers(network, tf.constant(inputs)))

    norms = [layer for layer in layers_of(network) if isinstance(layer, (BatchNorm, keras.layers.BatchNormalization))]
    may_couple = in_parts and is_of_user and all(type(norm) is keras.layers.BatchNormalization for norm in norms)
    norms = [norm for norm in norms if may_couple and norm.trainable]
    trainable = [(variable, variable.trainable) for norm in norms for variable in norm.variables]
    for norm in norms:
        norm.trainable = False  # whose statistics are known; what couples samples otherwise is looked for
    _, state = try_passes(
        run,
        before,
        averaged=lambda: {name for name in before.names if f"/{MOVING}" in name},
        forgotten=lambda names: names - {variable.path for variable in network.variables},
        may_couple=may_couple,
    )
    if adds and may_couple and isinstance(found[0], tf.Tensor):
        several = [samples] if samples.dtype.kind == "i" else [_apart(samples, scale) for scale in _SCALES]
        sums = ((added(some[:1]) + added(some[1:]), added(some)) for some in several)
        differs = not all(np.isclose(*pair, rtol=1e-3, equal_nan=True) or before.has_drawn() for pair in sums)
        state = dataclasses.replace(state, couples=state.couples or differs)
    if gradients:
        state = dataclasses.replace(state, bends=is_bent(*gradients, times=FACTORS[1]))
    if drawn:
        state = dataclasses.replace(state, forgotten=(*state.forgotten, _TF_RANDOM), remembers=True)
    before.restore()
    for norm in norms:
        norm.trainable = True
    for variable, value in trainable:
        variable.trainable = value
    return found[0], state


_SCALES = (1, 3, 10)


def _apart(samples: np.ndarray, scale: float) -> np.ndarray:
    """Return samples of which the first is small, since what a layer adds may have a least value."""
    factors = np.where(np.arange(len(samples)) > 0, scale, 1 / scale).astype(samples.dtype)
    return samples * factors.reshape(-1, *[1] * (samples.ndim - 1))


class _Snapshot:
    """Values of a network's variables, and of those of TensorFlow that its layers hold, which Keras does not keep."""

    def __init__(self, network: keras.Model, *, unchanged: Mapping[str, np.ndarray] = {}) -> None:
        self._network = network
        self._variables = variables = _variables(network)
        self._states = _random_states(network)
        # Flags and counts of Python, as Keras finds them when it traces the first step.
        self._attributes = [
            (layer, name, value)
            for layer in layers_of(network)
            if not type(layer).__module__.startswith("keras.")
            for name, value in vars(layer).items()
            if isinstance(value, _PLAIN) and name not in _OF_KERAS
        ]
        self._values = {**{path: one.numpy() for path, one in variables.items() if path not in unchanged}, **unchanged}
        self._seeds = [np.array(state) for state in self._states]

    @property
    def names(self) -> set[str]:
        """Names of all variables."""
        return set(self._variables)

    def changes(self) -> set[str]:
        """Return the names of what has changed since, without random states."""
        return {
            path
            for path, variable in self._variables.items()
            if not path.endswith(_SEED) and variable.numpy().tobytes() != self._values[path].tobytes()
        }

    def next(self, changed: Collection[str]) -> _Snapshot:
        """Return a snapshot of the network now, in which only the names of `changed` have other values."""
        same = {path: value for path, value in self._values.items() if path not in changed and not path.endswith(_SEED)}
        return _Snapshot(self._network, unchanged=same)

    def restore(self, *, without: Collection[str] = ()) -> None:
        """Put all values back, except for the names of `without`."""
        for path, variable in self._variables.items():
            if path not in without:
                variable.assign(self._values[path])
        for layer, name, value in self._attributes:
            if isinstance(vars(layer).get(name), _PLAIN):  # and no layer that was built in the first call
                layer.__dict__[name] = value
        self.reseed()

    def has_drawn(self) -> bool:
        """Return whether random numbers were drawn since the random states were put back."""
        return any(
            not np.array_equal(state.numpy(), value) for state, value in zip(self._states, self._seeds, strict=True)
        )

    def reseed(self, offset: int = 0) -> None:
        """Put the random states back, or others by that offset."""
        for state, value in zip(self._states, self._seeds, strict=True):
            state.assign(value + np.asarray(offset, value.dtype))


def _check_layers(network: keras.Model, model: str) -> None:
    """Refuse what would be trained in another way than Keras trains it, or cannot be trained on ranks at all."""
    for name in ("train_step", "test_step", "compute_loss"):
        if getattr(getattr(network, name), "__func__", None) is not getattr(keras.Model, name):
            raise UserError(
                f"expected a network with the {name} of Keras from --model {model}, received {type(network).__name__} "
                "with its own, which the trainer does not call; add to the loss by add_loss in call, or train by fit "
                "with allstep.tensorflow.horovod_keras"
            )
    if network.compiled and apparent_rank() == 0:
        note(f"--model {model} is compiled; the loss and the optimizer of the run replace those of compile")
    wanted = keras.config.dtype_policy().compute_dtype
    computes = {layer.compute_dtype for layer in layers_of(network) if layer.weights or not layer.built}
    if wanted != "float16" and "float16" in computes:
        raise UserError(
            f"--model {model} computes in float16, where gradients vanish without a loss scale; give --precision fp16"
        )
    if wanted != "float32" and computes and wanted not in computes:
        raise UserError(
            f"--model {model} was built before --precision could tell its layers to compute in {wanted}; give a "
            "function that builds it"
        )
    for layer in layers_of(network):
        if getattr(layer, "stateful", False):
            raise UserError(
                f"expected samples that do not depend on each other for --model {model}, received {layer.name}, which "
                "takes its state from the batch before; leave stateful=True out"
            )
    inputs = keras.tree.flatten(getattr(network, "inputs", None) or [])
    if sizes := [tensor.shape[0] for tensor in inputs if tensor.shape[0] is not None]:
        raise UserError(
            f"expected a network for batches of any size from --model {model}, received one for batches of {sizes[0]} "
            "alone; leave the size out: Input(shape=...) without batch_size or batch_shape"
        )


def _check_weights(network: keras.Model, model: str) -> None:
    if odd := [variable.path for variable in network.weights if variable.dtype in ("float16", "bfloat16", "float64")]:
        raise UserError(f"expected weights in float32 of --model {model}, received others, as {odd[0]}; convert them")
    if odd := [variable.path for variable in network.weights if getattr(variable, "overwrite_with_gradient", False)]:
        raise UserError(f"--model {model} has {odd[0]}, a scale of float8, which is no weight; leave float8 out")
    if not network.trainable_variables:
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


def _variables(network: keras.Model) -> dict[str, Any]:
    """Return a network's variables, and those of TensorFlow that its layers hold, which Keras does not know."""
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


def _random_states(network: keras.Model) -> list[Any]:
    """Return the states from which layers draw; the last one is for those without a generator: keras.random.normal()"""
    own = [variable for path, variable in _variables(network).items() if path.endswith(_SEED)]
    return [*own, global_seed_generator().state]


_PLAIN = (bool, int, float, str, type(None))
_OF_KERAS = frozenset(vars(keras.Model(name="any"))) | {"_called"}
MOVING = "moving_"
"""Beginning of the names of running statistics."""
_TF_RANDOM = "the state of tf.random, unlike that of keras.random,"
_SEED = "seed_generator_state"
"""End of the paths of Keras' random states."""


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: keras.Model) -> None:
        self._states = _random_states(network)

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        for number, state in enumerate(self._states):
            numbers = np.resize([(seed + number) % 2**32, seed >> 32], tuple(state.shape))
            state.assign(numbers.astype(tf.as_dtype(state.dtype).as_numpy_dtype))

    on_step = on_epoch = on_start  # validation may draw as well
