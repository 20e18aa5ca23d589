"""Networks. `pytorch/models.py` builds the same ones; layers are named so that weights have canonical names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import layers

from allstep.common.catalog.losses import LOSSES
from allstep.common.catalog.networks import MODELS, build, check_inputs, is_in_both, parsed
from allstep.common.checkpoint.state import ArrayShape
from allstep.common.config.train_config import TrainConfig
from allstep.common.data.datasets import Dataset
from allstep.common.recipe.weights import initial_weights
from allstep.common.training.hooks import Hook
from allstep.common.training.loss_trial import LossCheck
from allstep.common.training.trial import TRIAL
from allstep.common.training.trial_check import TrialCheck, has_parts
from allstep.tensorflow.derived_state import derive_again
from allstep.tensorflow.losses import measure_of
from allstep.tensorflow.networks.batch_norm import BatchNorm
from allstep.tensorflow.networks.transformers import Positions, Tokens
from allstep.tensorflow.numerics import check_settings

# Keras' policies by --precision; weights are float32 in all of them.
_POLICIES = {"float32": "float32", "tf32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def build_network(config: TrainConfig, dataset: Dataset, own: Any = None) -> tuple[keras.Model, Dataset]:
    """Build the network that --model names, for a data set, and note its outputs there.

    `own` replaces it by a network from a Python program, or by a function that builds one. Raises UserError if no
    network has that name, it does not fit the data set's samples, or its code changes Keras' types.
    """
    before = keras.config.dtype_policy()
    try:
        if config.model in MODELS:
            check_inputs(config.model, dataset)
            size = {**config.model_size, "num_tokens": dataset.num_tokens, "precision": config.precision}
            return build_model(config.model, dataset.input_shape, dataset.num_classes, **size), dataset
        from allstep.tensorflow.other_networks import build_other

        keras.config.set_dtype_policy(policy := policy_of(config))
        options, in_parts = parsed(config.model_args), has_parts(config)
        network = build_other(config.model, dataset, config.data.seed, own, options, in_parts=in_parts)
        check_settings(policy)
        return network, replace(dataset, num_outputs=vars(network)[TRIAL].num_outputs)
    finally:
        keras.config.set_dtype_policy(before)


def policy_of(config: TrainConfig) -> str:
    """Return the policy of Keras in which layers compute."""
    return _POLICIES[config.precision]


def hooks_of(config: TrainConfig, network: keras.Model) -> Sequence[Hook]:
    """Return the hooks that a network and its loss need; networks of the suite need none."""
    checks = [LossCheck(measure_of(config.loss))] if config.loss and config.loss not in LOSSES else []
    if config.model in MODELS:
        return checks
    from allstep.tensorflow.other_networks import Reseed
    from allstep.tensorflow.trial import MOVING

    anew = {variable.path for variable in network.non_trainable_variables}
    return Reseed(network), TrialCheck(vars(network)[TRIAL], averaged=MOVING, puts_back=False, anew=anew), *checks


def build_model(
    name: str, input_shape: tuple[int, ...], num_classes: int, *, precision: str = "float32", **size: int
) -> keras.Model:
    """See `common.catalog.networks.build`; layers compute in `precision`: float32, tf32, bf16 or fp16."""
    keras.config.set_dtype_policy(_POLICIES[precision])
    return build("tensorflow", name, input_shape, num_classes, **size)


def set_initial_weights(model: keras.Model, config: TrainConfig) -> None:
    """Set the weights from which both frameworks start, if both have the network; others keep their initial weights."""
    if is_in_both(config.model):
        shapes = {weight.name: weight.canonical_shape for weight in canonical_weights(model) if weight.is_float}
        import_weights(model, initial_weights(shapes, config.data.seed))


def export_weights(model: keras.Model) -> dict[str, np.ndarray]:
    """Return all weights as canonical arrays, which `common.recipe.weights` describes."""
    floats = (weight for weight in canonical_weights(model) if weight.is_float)
    return {weight.name: weight.to_canonical(weight.variable.value.numpy()) for weight in floats}


def import_weights(model: keras.Model, arrays: dict[str, np.ndarray]) -> None:
    """Set all weights from canonical arrays."""
    for weight in canonical_weights(model):
        if weight.name in arrays:
            weight.variable.assign(weight.from_canonical(arrays[weight.name]))
    derive_again(model)


@dataclass(frozen=True)
class CanonicalWeight:
    """Keras variable with its canonical name and the transformation to its canonical layout."""

    name: str
    variable: keras.Variable
    split: tuple[int, ...]
    """Shape, with a flattened input split into its axes."""
    axes: tuple[int, ...]
    """Order of the axes of `split` in the canonical layout."""

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        shape = tuple(self.split[axis] for axis in self.axes)
        return (shape[0], math.prod(shape[1:])) if self._was_flattened else shape

    @property
    def is_float(self) -> bool:
        """Whether it holds real numbers rather than counters or flags."""
        return "float" in self.variable.dtype

    def like(self, variable: keras.Variable) -> CanonicalWeight:
        """Return a variable of this weight, such as a slot, with the weight's layout if it has the weight's shape."""
        same = tuple(variable.shape) == tuple(self.variable.shape)
        return replace(self, variable=variable) if same else unchanged(self.name, variable)

    def array_shape(self, *, is_constant: bool) -> ArrayShape:
        """Return the shape of its array in a checkpoint."""
        return ArrayShape(self.canonical_shape, dtype=np.dtype(self.variable.dtype), finite=not is_constant)

    def to_canonical(self, array: np.ndarray) -> np.ndarray:
        canonical = array.reshape(self.split).transpose(self.axes)
        # np.ascontiguousarray would add an axis to a scalar.
        return np.asarray(canonical.reshape(canonical.shape[0], -1) if self._was_flattened else canonical, order="C")

    def from_canonical(self, array: np.ndarray) -> np.ndarray:
        canonical_split = tuple(self.split[axis] for axis in self.axes)
        back = np.argsort(self.axes)
        return np.ascontiguousarray(array.reshape(canonical_split).transpose(back)).reshape(self.variable.shape)

    @property
    def _was_flattened(self) -> bool:
        return len(self.split) > len(self.variable.shape)


NAMES = "allstep_names"
"""Attribute of a model: the names of layers in checkpoints by those in Keras, where they differ."""


def canonical_weights(model: keras.Model) -> Iterator[CanonicalWeight]:
    """Yield the model's variables, layer by layer, with canonical names and layouts.

    A variable keeps its path in the model and its layout if PyTorch does not have it, or if it does not belong to a
    top-level layer of the model.
    """
    named, names = set(), vars(model).get(NAMES, {})
    for weight in _layers_weights(model, names):
        named.add(weight.variable.path)
        yield weight
    for variable in model.weights:
        if variable.path not in named:
            parts = variable.path.removeprefix(f"{model.name}/").split("/")
            yield unchanged("/".join(names.get(part, part) for part in parts), variable)


def _layers_weights(model: keras.Model, names: Mapping[str, str]) -> Iterator[CanonicalWeight]:
    flattened: tuple[int, ...] = ()
    for layer in model.layers:
        name = names.get(layer.name, layer.name)
        if isinstance(layer, layers.Flatten) and hasattr(layer, "input"):  # missing in a subclassed model
            flattened = _shape(layer.input)[1:]
        elif isinstance(layer, layers.Conv2D):
            kernel = _variable(layer, "kernel")
            yield CanonicalWeight(f"{name}.weight", kernel, _shape(kernel), (3, 2, 0, 1))
            if layer.use_bias:
                yield unchanged(f"{name}.bias", layer.bias)
        elif isinstance(layer, BatchNorm):
            yield unchanged(f"{name}.weight", layer.gamma)
            yield unchanged(f"{name}.bias", layer.beta)
            yield unchanged(f"{name}.running_mean", layer.running_mean)
            yield unchanged(f"{name}.running_var", layer.running_variance)
        elif isinstance(layer, layers.LayerNormalization) and layer.scale and layer.center:
            yield unchanged(f"{name}.weight", layer.gamma)
            yield unchanged(f"{name}.bias", layer.beta)
        elif isinstance(layer, layers.Embedding):
            yield unchanged(f"{name}.weight", _variable(layer, "embeddings"))
        elif isinstance(layer, Positions):
            yield unchanged("pos_embed", layer.pos_embed)
        elif isinstance(layer, Tokens):
            yield unchanged("cls_token", layer.cls_token)
            yield unchanged("pos_embed", layer.pos_embed)
        elif isinstance(layer, layers.Dense):
            kernel = _variable(layer, "kernel")
            num_inputs, units = _shape(kernel)
            if len(flattened) == 3 and math.prod(flattened) == num_inputs:
                yield CanonicalWeight(f"{name}.weight", kernel, (*flattened, units), (3, 2, 0, 1))
            else:
                yield CanonicalWeight(f"{name}.weight", kernel, _shape(kernel), (1, 0))
            if layer.use_bias:
                yield unchanged(f"{name}.bias", layer.bias)
            flattened = ()


def _variable(layer: keras.layers.Layer, name: str) -> keras.Variable:
    """Return the layer's variable of that name; after `enable_lora` the attribute would include the adapter."""
    return next(variable for variable in layer.weights if variable.name == name)


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def trainable_names(model: keras.Model) -> list[str]:
    """Return the canonical names of the weights that have gradients."""
    return [weight.name for weight in canonical_weights(model) if weight.variable.trainable]


def unchanged(name: str, variable: keras.Variable) -> CanonicalWeight:
    """Return a weight that has the same layout in both frameworks."""
    return CanonicalWeight(name, variable, tuple(variable.shape), tuple(range(len(variable.shape))))
