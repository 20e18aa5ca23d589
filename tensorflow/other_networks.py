"""Networks from a user's file or from keras.applications; `pytorch/other_networks.py` has those for PyTorch.

Weights of top-level layers that PyTorch also has get its names and layouts (`models.canonical_weights`); others keep
their paths in Keras. The network draws its initial weights by --seed, and all ranks start from those of rank 0. If a
file has FUNCTION_pytorch and FUNCTION_tensorflow, each framework calls its function, and both start from the suite's
canonical weights, so that their curves can be compared. A dictionary NAMES in the file maps names of Keras layers to
their names in PyTorch, if these differ.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from allstep.common.base.errors import UserError, note
from allstep.common.catalog import user_file
from allstep.common.catalog.network_outputs import check_outputs
from allstep.common.catalog.networks import cannot_build, is_in_both, network_of_user, unknown_name
from allstep.common.data.datasets import Dataset
from allstep.common.launch.placement import apparent_rank
from allstep.common.recipe.weights import step_seed
from allstep.common.training.hooks import Hook
from allstep.common.training.training_run import TrainingRun
from allstep.common.training.trial import TRIAL
from allstep.tensorflow.compat import layers_in_order, layers_of, to_snake_case
from allstep.tensorflow.models import NAMES, canonical_weights
from allstep.tensorflow.trial import random_states, try_network


def build_other(
    model: str,
    dataset: Dataset,
    seed: int,
    own: Any = None,
    options: Mapping[str, Any] = {},
    *,
    in_parts: bool = True,
) -> keras.Model:
    """Build the network that `model` names and try it on two samples of random numbers.

    Raises UserError if no network has that name, it cannot be built, or its outputs do not fit the data set.

    Args:
        model: FILE.py:FUNCTION or keras:NAME.
        own: a network from a Python program, or a function that builds it; it replaces the one that --model names.
        options: more arguments of the function that builds it.
        in_parts: whether a batch may be computed in parts, so that the trial covers their effects as well.
    """
    keras.utils.set_random_seed(seed % 2**32)  # NumPy's seeds have 32 bits
    around = tf.distribute.get_strategy()
    file = user_file.parse(model)
    if own is not None or file:
        network = network_of_user(model, "tensorflow", dataset, own, options, kind=keras.Model)
        if not isinstance(network, keras.Model):
            raise UserError(
                f"expected a keras.Model from --model {model}, received {type(network).__name__}; return one"
            )
        _check_layers(network, model)
        _check_strategy(network, model, around)
        expected = f"a network for samples of shape {dataset.input_shape}"
        outputs = user_file.call(
            try_network, network, dataset, model, is_of_user=True, in_parts=in_parts, flag=f"--model {model}",
            expected=expected,
        )  # fmt: skip
    else:
        try:
            network = _keras(model.partition(":")[2], dataset, options)
            outputs = try_network(network, dataset, model)
        except UserError:
            raise
        except Exception as error:
            raise cannot_build(model, dataset, error) from error
    tf.random.set_seed((seed + apparent_rank()) % 2**32)  # the trial has drawn from it
    check_outputs(model, outputs, dataset)
    network.__dict__[TRIAL] = dataclasses.replace(vars(network)[TRIAL], num_outputs=outputs.shape[-1])
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


def _check_layers(network: keras.Model, model: str) -> None:
    """Refuse a network that would be trained differently than by Keras, or that cannot be trained on several ranks."""
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


def _check_strategy(network: keras.Model, model: str, around: tf.distribute.Strategy) -> None:
    """Refuse a network that is built in the scope of another strategy than that `around` it."""
    if around is not tf.distribute.get_strategy() and not tf.distribute.has_strategy():
        raise UserError(
            f"--model {model} ends the scope of --strategy, as keras.backend.clear_session() does; leave that out"
        )
    of_variables = {getattr(variable.value, "distribute_strategy", None) for variable in network.variables}
    if others := {tf.distribute.get_strategy(), *of_variables} - {None, around}:
        raise UserError(
            f"expected a network without a strategy of its own from --model {model}, received one in the scope of "
            f"{type(others.pop()).__name__}; leave the scope out, and give --strategy"
        )


def _check_weights(network: keras.Model, model: str) -> None:
    if odd := [variable.path for variable in network.weights if variable.dtype in ("float16", "bfloat16", "float64")]:
        raise UserError(f"expected weights in float32 of --model {model}, received others, as {odd[0]}; convert them")
    if odd := [variable.path for variable in network.weights if getattr(variable, "overwrite_with_gradient", False)]:
        raise UserError(f"--model {model} has {odd[0]}, a scale of float8, which is no weight; leave float8 out")
    if not network.trainable_variables:
        raise UserError(f"expected a network with weights to train from --model {model}, received none; return another")


class Reseed(Hook):
    """Reseeds dropout in each step as a function of seed, step and rank, so that a resumed run draws the same."""

    def __init__(self, network: keras.Model) -> None:
        self._states = random_states(network)

    def on_start(self, session: TrainingRun) -> None:
        seed = step_seed(session.config.data.seed, session.progress.step, session.placement.rank)
        for number, state in enumerate(self._states):
            numbers = np.resize([(seed + number) % 2**32, seed >> 32], tuple(state.shape))
            state.assign(numbers.astype(tf.as_dtype(state.dtype).as_numpy_dtype))

    on_step = on_epoch = on_start  # validation may draw as well


def first_names(network: keras.Model) -> dict[str, str]:
    """Return the names that numbered layers would have in a process that builds only this network, by present names.

    Keras counts the layers of a process, so a network that is built again, as in a notebook, gets other names. If the
    numbers of a kind are not in the order of the network, its layers keep their names: the user may have given them.
    """
    numbers, others = defaultdict[str, list[int]](list), set[str]()
    for layer in layers_in_order(network):
        # A wrapper such as Bidirectional puts a word before the name.
        kind = re.escape(to_snake_case(type(layer).__name__))
        if match := re.fullmatch(rf"((?:\w+_)?{kind})(?:_(\d+))?", layer.name):
            numbers[match[1]].append(int(match[2] or 0))
        else:
            others.add(layer.name)
    return {
        _numbered(stem, number): _numbered(stem, count)
        for stem, found in numbers.items()
        for count, number in enumerate(found)
        if found == sorted(set(found)) and others.isdisjoint(_numbered(stem, count) for count in range(len(found)))
    }


def _numbered(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem
